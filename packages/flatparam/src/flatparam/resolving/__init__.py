"""From the arguments of a wrapper to the plans of its units; nothing in here changes a module."""
