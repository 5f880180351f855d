"""Steps of neighbours in a shard as one tensor, and of long parameters in pieces."""
