"""Releases of one package: what it changes in the repository, and what it refuses."""
