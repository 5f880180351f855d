"""How optimizers step flat parameters, and which are refused."""
