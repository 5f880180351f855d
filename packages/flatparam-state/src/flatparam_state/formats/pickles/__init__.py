"""Pickles, read and written without importing or running what they name."""
