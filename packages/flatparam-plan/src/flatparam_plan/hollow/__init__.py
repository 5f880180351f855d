"""Memory that is counted and never touched, and what runs in it."""
