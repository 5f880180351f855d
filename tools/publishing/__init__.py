"""What publishing costs, that it loses nothing, and a trainer and a generator that use it."""
