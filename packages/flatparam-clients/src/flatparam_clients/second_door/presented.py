"""The class of a module that FSDP2's `fully_shard` has sharded: its state is what its parameters show."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

import flatparam_runtime as runtime
from flatparam.compat.patching import torchs_own
from flatparam.in_place.module import FSDPModule
from flatparam_clients.names import STATE_FUNCTIONS

__all__ = ["PresentedModule", "presents"]


class PresentedModule(FSDPModule):
    """A module whose parameters are `DTensor`s, so that torch's own functions of state are right about it."""

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the parameters, detached, in the memory of the shards, and the buffers; as torch's FSDP2 does."""
        for unit in runtime.units_in(self):
            if not unit.is_needed:
                unit.reshard()
        ask: Any = super(FSDPModule, self).state_dict
        return ask(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _fqn_modifiers(self) -> dict[str, str]:  # type: ignore[override]  # the class refuses
        """Tell torch's functions of state that no name is changed."""
        return {}

    def _load_from_state_dict(self, *arguments: Any) -> None:
        # A module around it loads it: what is copied to a parameter is copied to its part of the shard.
        load: Any = super(FSDPModule, self)._load_from_state_dict
        load(*arguments)


def presents(model: nn.Module) -> bool:
    """Return whether a module of `model` was sharded by FSDP2's `fully_shard`."""
    return any(isinstance(each, PresentedModule) for each in model.modules())


def routed(name: str, ours: Any) -> Any:
    """Return the function `name` of `torch.distributed.checkpoint.state_dict`: torch's own for models that present."""

    @functools.wraps(ours)
    def function(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not presents(model):
            return ours(model, *args, **kwargs)
        if kwargs.get("options") is not None:
            # A class of ours may have taken the name of torch's.
            kwargs["options"] = torchs_own(STATE_FUNCTIONS, "StateDictOptions")(**vars(kwargs["options"]))
        return torchs_own(STATE_FUNCTIONS, name)(model, *args, **kwargs)

    return function
