"""Code of a model's own that runs while its state is loaded, and the units that show it their full parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final, final

import attrs
import torch
from torch import nn

from flatparam_runtime import Unit, inside, summon_full_params
from flatparam_state.forms.deferred import is_ordinary

__all__ = ["ShownUnits"]

_OURS: Final = frozenset(
    {"flatparam", "flatparam_state", "flatparam_runtime", "flatparam_comm", "flatparam_core"}
)
_READS_STATE_ONLY: Final = _OURS | {"torch", "bitsandbytes", "peft"}
"""The packages whose code does not look at the parameters of the module that is loaded."""


@final
@attrs.define(eq=False)
class ShownUnits:
    """The units that show their full parameters, while a state is loaded, to code of their modules' own."""

    units: set[Unit] = attrs.field(factory=set)
    modules: set[nn.Module] = attrs.field(factory=set)
    """The modules of these units."""
    _before: list[tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=list)
    """The tensors of these modules, and the shards of these units, with the values that they had before."""
    _contexts: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)

    def add(self, unit: Unit) -> None:
        """Show the full parameters of `unit`, if its modules have code of their own; every rank does so."""
        # Inside summon_full_params() they are shown already; and those that are elsewhere cannot be.
        if unit in self.units or unit.showing.pins or unit.showing.away:
            return
        modules = (unit.module, *inside(unit.module))
        if not any(map(_has_own_code, modules)):
            return
        self.units.add(unit)
        self.modules.update(modules)
        named = [info for handle in unit.handles for infos in handle.param_infos for info in infos]
        sharded = {(info.module, info.param_name) for info in named}
        kept: list[torch.Tensor] = [handle.flat_param for handle in unit.handles]
        for module in modules:
            plain = {**module._parameters, **module._buffers}
            kept += [p for name, p in plain.items() if is_ordinary(p) and (module, name) not in sharded]
        self._before += [(tensor.detach(), tensor.detach().clone()) for tensor in kept]
        self._contexts.enter_context(summon_full_params(unit.module, recurse=False))

    def write_back(self) -> None:
        """Write back what torch and the modules' own code have put into full parameters, and free these."""
        self._contexts.close()

    def keep(self) -> None:
        """Keep what was written back."""
        self._before.clear()

    def undo(self) -> None:
        """Give the shards, and what is not sharded, the values that they had before, unless what came is kept."""
        for tensor, values in self._before:
            tensor.copy_(values)
        self._before.clear()


def _has_own_code(module: nn.Module) -> bool:
    """Whether `module` may look at its parameters while it is loaded: it has hooks, or its own way to load itself."""
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    functions = [module._load_from_state_dict, *(getattr(hook, "hook", hook) for hook in hooks)]
    return not all(map(_is_known, functions))


def _is_known(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    home: str = getattr(function, "__module__", None) or type(function).__module__
    return home.partition(".")[0] in _READS_STATE_ONLY
