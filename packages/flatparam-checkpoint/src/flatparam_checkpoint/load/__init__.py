"""Loading: what this rank needs is read and verified first, and installed once all ranks have agreed."""
