"""Checkpoints as sources over stored tensors, and the trees of other programs brought into that form."""
