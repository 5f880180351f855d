"""A unit: a module, the parameters that it shards together, and their state."""
