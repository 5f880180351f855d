"""The door through which programs of FSDP2 come: `fully_shard`, and parameters that are `DTensor`s."""
