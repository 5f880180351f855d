"""The modules that hold objects of FSDP1, because they imported them before they were patched."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

from flatparam.compat.patching import Patch
from flatparam_clients.names import FSDP

__all__ = ["patches_of_holders"]

_LEFT_ALONE: Final = (
    # The implementation of FSDP1 and of FSDP2.
    f"{FSDP}._",
    "torch.distributed._composable",
    # The compiler, which has rules of its own for them.
    "torch._dynamo",
    "torch._inductor",
    "torch.testing",
    # Our own modules hold what they need of torch on purpose.
    "flatparam",
    "flatparam_clients",
)
"""The modules, and what is in them, that keep torch's objects."""


def patches_of_holders(ours_for: Mapping[int, tuple[Any, Any]]) -> Iterator[Patch]:
    """Yield a patch for each attribute of a module in memory that is one of torch's objects.

    Args:
        ours_for: by the `id` of each of torch's objects, the object and ours.
    """
    for name, module in list(sys.modules.items()):
        if _is_left_alone(name) or not _is_module(module):
            continue
        for attribute, value in list(vars(module).items()):
            theirs, ours = ours_for.get(id(value), (None, None))
            if theirs is not None and theirs is value:
                yield Patch(module, attribute, ours)


def _is_module(thing: object) -> bool:
    """Return whether `thing` is a module; programs put other things among the modules, too."""
    return isinstance(thing, ModuleType)


def _is_left_alone(name: str) -> bool:
    return any(
        name.startswith(prefix) if prefix.endswith("_") else name == prefix or name.startswith(f"{prefix}.")
        for prefix in _LEFT_ALONE
    )
