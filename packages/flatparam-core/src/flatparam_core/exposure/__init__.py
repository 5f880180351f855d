"""What a sharded module shows under its parameters' names."""
