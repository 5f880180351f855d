"""Checkpoints in the formats of other programs."""
