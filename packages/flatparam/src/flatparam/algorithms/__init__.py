"""Algorithms that a user can put in place of the default ones."""
