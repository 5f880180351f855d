"""FSDP1's package of algorithms: nothing but the communication hooks."""
