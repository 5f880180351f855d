"""`flatparam plan`: its arguments, and what it does."""

from flatparam_plan.command.plan_arguments import add

__all__ = ["add"]
