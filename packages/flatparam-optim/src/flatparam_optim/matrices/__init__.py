"""Steps of whole matrices: each cut one is brought to the rank that owns it, and its update is sent back."""
