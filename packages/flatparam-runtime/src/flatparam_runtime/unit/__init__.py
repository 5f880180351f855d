"""A unit: a module, the parameters that it shards together, and what happens to them."""
