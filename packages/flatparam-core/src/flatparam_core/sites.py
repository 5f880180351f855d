"""The module attributes under which the parameters of one layout are seen."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import nn
from typing_extensions import Self, final

from flatparam_core.bindings import BoundParameter, ParamInfo
from flatparam_core.errors import FlatParamError

__all__ = ["Sites", "replaced"]


@final
@attrs.define(eq=False)
class Sites:
    """Every attribute that holds a parameter of one layout, and what was last put there."""

    infos: list[tuple[ParamInfo, ...]]
    shown: list[torch.Tensor | None]

    @classmethod
    def of(cls, bound: Sequence[BoundParameter]) -> Self:
        """The attributes of `bound`, which show their parameters now."""
        return cls([b.infos for b in bound], [b.parameter for b in bound])

    def put(self, values: Sequence[torch.Tensor | None]) -> None:
        """Register each value under all the names of its parameter.

        Raises:
            FlatParamError: where somebody else has put another parameter there since, naming it.
        """
        for infos, before in zip(self.infos, self.shown, strict=True):  # all of them, before anything changes
            for info in infos:
                if info.module._parameters.get(info.param_name) is not before:
                    raise replaced(info)
        for infos, value in zip(self.infos, values, strict=True):
            for info in infos:
                _register(info, value)
        self.shown = list(values)

    def add(self, index: int, infos: Sequence[ParamInfo]) -> None:
        """Show parameter `index` under further names too, from now on."""
        self.infos[index] += tuple(infos)
        for info in infos:
            _register(info, self.shown[index])


def _register(info: ParamInfo, value: torch.Tensor | None) -> None:
    module = info.module
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[info.param_name] = value  # type: ignore[assignment]  # or what a presenter makes
    else:  # for example nn.LSTM, which keeps a list of its weights beside their names
        setattr(module, info.param_name, value)


def replaced(info: ParamInfo) -> FlatParamError:
    """The error for a parameter that is not the one that was put there."""
    return FlatParamError(
        f"parameter {info.fqn!r} was replaced by another object after its module was sharded, so the other ranks would "
        "train without it; change its values instead, inside summon_full_params(), or replace it before sharding"
    )
