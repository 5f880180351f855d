"""Decorators around any engine: each changes one thing, and forwards the rest."""
