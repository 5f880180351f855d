"""The safetensors format: the header, and the stream of the tensors behind it."""
