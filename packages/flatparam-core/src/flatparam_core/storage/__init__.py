"""The memory of a flat parameter: the full parameters, the gradients, and who keeps what is freed."""
