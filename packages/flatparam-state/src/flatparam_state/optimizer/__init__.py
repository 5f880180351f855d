"""The state of an optimizer over sharded parameters, by the names of the parameters."""
