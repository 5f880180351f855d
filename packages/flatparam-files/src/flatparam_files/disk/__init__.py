"""The files of checkpoints as bytes: ranges that are read, writes that last, JSON, and safetensors."""
