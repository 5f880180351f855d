"""A model's tensors in files of any format, read by ranks of which each needs only a part."""
