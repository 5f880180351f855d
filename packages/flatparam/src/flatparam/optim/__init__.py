"""Optimizers that step whole matrices, however their parameters are sharded: exact, each matrix once in the world.

See the guide `docs/guides/optimizers.md`.
"""

from flatparam.optim.muon import Muon

__all__ = ["Muon"]
