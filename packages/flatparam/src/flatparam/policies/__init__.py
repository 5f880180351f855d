"""Which submodules of a model become units of their own."""
