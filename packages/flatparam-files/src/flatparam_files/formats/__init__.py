"""Checkpoints in the formats of other programs: opened as sources, written from sources, a piece at a time."""
