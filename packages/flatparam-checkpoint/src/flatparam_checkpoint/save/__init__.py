"""Saving by ranks: what each contributes, and how all agree that it is a checkpoint."""
