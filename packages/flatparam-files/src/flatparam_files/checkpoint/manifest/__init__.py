"""The manifest of a checkpoint: its records, the values in it, and the file that shows every changed bit."""
