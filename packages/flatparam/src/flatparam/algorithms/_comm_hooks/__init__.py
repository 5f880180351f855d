"""FSDP1's package of communication hooks: its names."""

from flatparam.algorithms._comm_hooks import default_hooks
from flatparam.wrapper.averaging import LOW_PRECISION_HOOKS

__all__ = ["LOW_PRECISION_HOOKS", "default_hooks"]
