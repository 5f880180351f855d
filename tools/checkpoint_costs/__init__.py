"""What `compare_checkpoints.py` compares, and how it measures."""
