"""The state of a sharded model, under the names that the unsharded model has."""
