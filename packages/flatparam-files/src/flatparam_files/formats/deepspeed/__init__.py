"""Checkpoints that DeepSpeed's ZeRO writes."""
