"""The engine over process groups of `torch.distributed`."""
