"""A world whose ranks are processes that are forked or spawned."""
