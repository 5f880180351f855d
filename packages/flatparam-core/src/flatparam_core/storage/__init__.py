"""The memory of a flat parameter: the full parameters, the gradients, and the pool that keeps freed memory."""
