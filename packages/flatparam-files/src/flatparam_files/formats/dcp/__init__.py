"""Directories that `torch.distributed.checkpoint` writes."""
