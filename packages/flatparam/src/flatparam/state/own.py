"""The modules and buffers that belong to the unit of a wrapper itself, and not to units inside."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from flatparam.wrapper.interior import inner_module
from flatparam_core import clean_fqn
from flatparam_runtime import Unit, inside

__all__ = ["own_buffers", "modules_of_unit"]


def modules_of_unit(wrapper: nn.Module, unit: Unit) -> set[nn.Module]:
    """Return the modules of the wrapper's unit.

    A wrapper for activation checkpointing, which may have been put around the unit's module since, is one of them.
    """
    inner = inner_module(wrapper)
    return {inner, *inside(inner), unit.module, *inside(unit.module)}


def own_buffers(wrapper: nn.Module, unit: Unit) -> Iterator[str]:
    """Yield the names of the buffers of the unit's own modules, below the wrapper."""
    own = modules_of_unit(wrapper, unit)
    for path, module in wrapper.named_modules():
        if module in own:
            yield from (clean_fqn(f"{path}.{name}" if path else name) for name in module._buffers)
