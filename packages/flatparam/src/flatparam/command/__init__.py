"""The command `flatparam`: what can be done with checkpoints without ranks, devices or the model's code."""

from flatparam.command.running import main

__all__ = ["main"]
