"""The inside of a wrapper: the module that it stands for, the things beside it; and which modules are wrappers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, final

import attrs
from torch import nn
from torch.distributed._composable.contract import _get_registry

from flatparam.api import StateDictSettings
from flatparam.state.tree_load import TreeLoad
from flatparam_core import FSDP_WRAPPED_MODULE
from flatparam_runtime import Unit, call_unit, unit_of, untraced

__all__ = [
    "Interior",
    "forward",
    "inner_module",
    "interior_of",
    "item_of",
    "module_of",
    "unit_inside",
    "wrappers_in",
]

_INTERIOR = "_interior"
"""The attribute of a wrapper that holds it."""


@final
@attrs.define(eq=False)
class Interior:
    """The things that a wrapper holds beside the wrapped module: no parameter, no buffer, and no module."""

    unit: Unit
    settings: StateDictSettings
    """The form of the wrapper's state."""
    clean_names: bool = False
    """Whether parameters and buffers always have the names of the unwrapped module."""
    is_loading: bool = False
    """Whether the wrapper's own `load_state_dict` is under way."""
    is_strict: bool = False
    """Whether the wrapper's own `load_state_dict`, if it is under way, refuses missing and unexpected names."""
    has_told: bool = False
    """Whether the ranks have told each other what does not fit in the wrapper's own `load_state_dict` under way."""
    load: TreeLoad | None = None
    """The loading that the wrapper takes part in, or took part in last if that one failed."""

    @contextlib.contextmanager
    def being_strict(self, strict: bool) -> Iterator[None]:
        """Inside, a missing or unexpected name keeps everything from being loaded if `strict`; torch tells no hook."""
        before = self.is_loading, self.is_strict
        self.is_loading, self.is_strict = True, strict
        self.has_told = False
        try:
            yield
        finally:
            self.is_loading, self.is_strict = before


def interior_of(module: nn.Module) -> Interior | None:
    """Return the interior of a wrapper; `None` of any other module."""
    interior: Interior | None = vars(module).get(_INTERIOR)
    return interior


@partial(untraced, with_callees=False)
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the wrapped module, with its full parameters in place."""
    interior, inner = interior_of(self), self._modules[FSDP_WRAPPED_MODULE]
    assert interior is not None, "a wrapper is made with it"
    assert inner is not None, "and with a module"
    return call_unit(interior.unit, inner, args, kwargs)


def module_of(self: nn.Module) -> nn.Module:
    """Return the wrapped module, without an activation-checkpointing wrapper around it."""
    inner = inner_module(self)
    checkpointed = inner._modules.get("_checkpoint_wrapped_module")
    return inner if checkpointed is None else checkpointed


def item_of(self: nn.Module, key: Any) -> Any:
    """Index the wrapped module."""
    # The user says that the module can be indexed.
    return module_of(self)[key]  # type: ignore[index]


def inner_module(module: nn.Module) -> nn.Module:
    """Return the wrapped module if `module` is a wrapper, otherwise `module` itself."""
    inner = module._modules.get(FSDP_WRAPPED_MODULE) if interior_of(module) is not None else None
    return module if inner is None else inner


def unit_inside(module: nn.Module) -> Unit:
    """Return the unit of a wrapped module, which may be given with or without its wrapper.

    Raises:
        ValueError: if the module is not wrapped.
    """
    unit = unit_of(inner_module(module))
    if unit is None:
        raise ValueError(f"expected a wrapped module, found a {type(module).__name__} that is not")
    return unit


def wrappers_in(module: nn.Module, *, root_only: bool = False) -> dict[nn.Module, Interior]:
    """Return the wrappers in `module`, itself included, depth first, each once with its interior.

    Args:
        root_only: leave out wrappers that are inside others.
    """
    found: dict[nn.Module, Interior] = {}
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        interior = interior_of(current)
        if interior is not None:
            found[current] = interior
            if root_only:
                continue
        stack.extend(child for child in reversed(list(current.children())) if not _is_replicated(child))
    return found


def _is_replicated(module: nn.Module) -> bool:
    """Return whether torch's composable `replicate` has `module`: then it is not FSDP's."""
    return "replicate" in (_get_registry(module) or ())
