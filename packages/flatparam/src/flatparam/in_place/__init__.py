"""`fully_shard`, which shards a module in place: FSDP2's function, over flat parameters."""
