"""Policies choose the submodules of a model that become units of their own."""
