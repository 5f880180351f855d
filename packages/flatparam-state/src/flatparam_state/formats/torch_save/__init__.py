"""Files that `torch.save` writes: a zip archive of a pickle and of storages."""
