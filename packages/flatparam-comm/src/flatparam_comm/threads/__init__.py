"""A world whose ranks are threads of one process."""
