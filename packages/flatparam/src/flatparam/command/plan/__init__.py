"""`flatparam plan`: its arguments, and what it does."""
