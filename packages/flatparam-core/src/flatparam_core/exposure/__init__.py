"""The tensors that a sharded module shows under its parameters' names."""
