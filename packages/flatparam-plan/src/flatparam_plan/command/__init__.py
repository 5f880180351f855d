"""`flatparam plan`: its arguments, and what it does."""

from flatparam_plan.command.arguments import add

__all__ = ["add"]
