"""FSDP1's package of communication hooks: its names, of which the add-on flatparam-clients has the hooks."""

from typing import TYPE_CHECKING

from flatparam.addons import lazily
from flatparam.algorithms._comm_hooks import default_hooks

if TYPE_CHECKING:
    from flatparam_clients import LOW_PRECISION_HOOKS

__all__ = ["LOW_PRECISION_HOOKS", "default_hooks"]

__getattr__ = lazily(__name__, {"flatparam_clients": ("LOW_PRECISION_HOOKS",)})
