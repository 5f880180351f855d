"""What a sharded module shows under its parameters' names, and what `parameters()` lists.

Two answers to one protocol: the flat parameter (`use_orig_params=False`), or the original parameters as views of the
shard (`use_orig_params=True`). Both show the full parameters, as leaves, while they are unsharded.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import nn
from typing_extensions import Self, final

from flatparam_core.bindings import BoundParameter, ParamInfo
from flatparam_core.errors import FlatParamError
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.layout import FlatLayout

__all__ = ["Exposure", "FlatExposure", "OriginalExposure"]


class Exposure(Protocol):
    """What stands under the parameters' names while a unit is sharded, and where its gradients appear."""

    def parameters(self) -> Sequence[nn.Parameter]:
        """What an optimizer holds: leaves that live as long as the unit."""
        ...

    def requires_grad(self) -> Sequence[bool]:
        """For each parameter of the layout, whether it is to get a gradient now."""
        ...

    def show(self, tensors: Sequence[nn.Parameter | None]) -> None:
        """Put full tensors (or `None`) under the parameters' names, as registered parameters."""
        ...

    def show_shard(self) -> None:
        """Put the sharded form back under the parameters' names."""
        ...

    def list_flat_parameter(self, listed: bool) -> None:
        """Have `module.parameters()` list the flat parameter, or not; nothing where it never does."""
        ...

    def add_gradient(self, reduced: torch.Tensor, arrived: Sequence[int]) -> None:
        """Add the reduced gradient of the shard to `.grad`.

        Args:
            reduced: 1-D, `layout.shard_numel` elements, dtype of the shard; the exposure keeps it.
            arrived: for each parameter, non-zero where some rank had a gradient; the others keep theirs, or `None`.
        """
        ...


@final
@attrs.define(eq=False)
class _Sites:
    """Every attribute that holds a parameter of one layout, and what was last put there."""

    infos: tuple[tuple[ParamInfo, ...], ...]
    shown: list[nn.Parameter | None]

    @classmethod
    def of(cls, bound: Sequence[BoundParameter]) -> Self:
        return cls(tuple(b.infos for b in bound), [b.parameter for b in bound])

    def put(self, values: Sequence[nn.Parameter | None]) -> None:
        """Register each value under all the names of its parameter.

        Raises:
            FlatParamError: where somebody else has put another parameter there since, naming it.
        """
        for infos, before in zip(self.infos, self.shown, strict=True):  # all of them, before anything changes
            for info in infos:
                if info.module._parameters.get(info.param_name) is not before:
                    raise _replaced(info)
        for infos, value in zip(self.infos, values, strict=True):
            for info in infos:
                module = info.module
                if type(module).__setattr__ is nn.Module.__setattr__:
                    module._parameters[info.param_name] = value
                else:  # for example nn.LSTM, which keeps a list of its weights beside their names
                    setattr(module, info.param_name, value)
        self.shown = list(values)


def _replaced(info: ParamInfo) -> FlatParamError:
    return FlatParamError(
        f"parameter {info.fqn!r} was replaced by another object after its module was sharded, so the other ranks would "
        "train without it; change its values instead, inside summon_full_params(), or replace it before sharding"
    )


@final
@attrs.define(eq=False)
class FlatExposure:
    """`parameters()` lists the flat parameter; under the original names stand plain 1-D views of the shard."""

    flat_param: FlatParameter
    owner: weakref.ReferenceType[nn.Module]
    attribute: str
    """The name under which the owner registers the flat parameter."""
    _sites: _Sites
    _views: tuple[torch.Tensor, ...]

    @classmethod
    def attach(
        cls, owner: nn.Module, attribute: str, flat_param: FlatParameter, bound: Sequence[BoundParameter]
    ) -> Self:
        """Register `flat_param` in `owner` and take the original parameters out of their modules."""
        views = tuple(
            flat_param.detach()[fragment.in_shard.as_slice()]
            for fragment in flat_param.flat_layout.fragments(flat_param.rank)
        )
        exposure = cls(flat_param, weakref.ref(owner), attribute, _Sites.of(bound), views)
        owner.register_parameter(attribute, flat_param)
        exposure.show_shard()
        return exposure

    def parameters(self) -> Sequence[nn.Parameter]:
        """See `Exposure.parameters`."""
        return (self.flat_param,)

    def requires_grad(self) -> Sequence[bool]:
        """See `Exposure.requires_grad`."""
        return (self.flat_param.requires_grad,) * len(self._views)

    def show(self, tensors: Sequence[nn.Parameter | None]) -> None:
        """See `Exposure.show`."""
        self._sites.put(tensors)
        for infos in self._sites.infos:
            for info in infos:
                info.module.__dict__.pop(info.param_name, None)

    def show_shard(self) -> None:
        """See `Exposure.show_shard`."""
        # The registered entry becomes None, which parameters() passes over and which keeps its place in the order; the
        # plain view in the instance dict is what the attribute then reads: right dtype and device, and safe to touch.
        self._sites.put((None,) * len(self._views))
        for infos, view in zip(self._sites.infos, self._views, strict=True):
            for info in infos:
                info.module.__dict__[info.param_name] = view

    def list_flat_parameter(self, listed: bool) -> None:
        """See `Exposure.list_flat_parameter`."""
        owner = self.owner()
        if owner is not None:
            owner._parameters[self.attribute] = self.flat_param if listed else None

    def add_gradient(self, reduced: torch.Tensor, arrived: Sequence[int]) -> None:
        """See `Exposure.add_gradient`."""
        if not any(arrived):
            return
        if self.flat_param.grad is None:
            self.flat_param.grad = reduced
        else:
            self.flat_param.grad += reduced


@final
@attrs.define(eq=False)
class OriginalExposure:
    """`parameters()` lists the original parameter objects, each a 1-D view of its part of the shard."""

    flat_param: FlatParameter
    layout: FlatLayout
    rank: int
    originals: tuple[nn.Parameter, ...]
    _sites: _Sites

    @classmethod
    def attach(cls, flat_param: FlatParameter, bound: Sequence[BoundParameter]) -> Self:
        """Turn the original parameters into views of the shard, once; optimizers that hold them go on working."""
        layout, rank = flat_param.flat_layout, flat_param.rank
        for parameter, fragment in zip(bound, layout.fragments(rank), strict=True):
            parameter.parameter.data = flat_param.data[fragment.in_shard.as_slice()]
            parameter.parameter.grad = None  # a full one; what is added from now on has the fragment's shape
        return cls(flat_param, layout, rank, tuple(b.parameter for b in bound), _Sites.of(bound))

    def parameters(self) -> Sequence[nn.Parameter]:
        """See `Exposure.parameters`."""
        return self.originals

    def requires_grad(self) -> Sequence[bool]:
        """See `Exposure.requires_grad`."""
        return [parameter.requires_grad for parameter in self.originals]

    def show(self, tensors: Sequence[nn.Parameter | None]) -> None:
        """See `Exposure.show`.

        Raises:
            FlatParamError: where somebody gave an original other data, which the shard would never see.
        """
        home = self.flat_param.untyped_storage()._cdata
        for parameter, infos in zip(self.originals, self._sites.infos, strict=True):
            if parameter.numel() and parameter.untyped_storage()._cdata != home:
                raise FlatParamError(
                    f"parameter {infos[0].fqn!r} was given other data after its module was sharded (by "
                    "`.data =`, or by "
                    "moving or casting the module); change its values in place instead"
                )
        self._sites.put(tensors)

    def show_shard(self) -> None:
        """See `Exposure.show_shard`."""
        self._sites.put(self.originals)

    def list_flat_parameter(self, listed: bool) -> None:
        """Nothing: it is never listed."""

    def add_gradient(self, reduced: torch.Tensor, arrived: Sequence[int]) -> None:
        """See `Exposure.add_gradient`."""
        for parameter, fragment in zip(self.originals, self.layout.fragments(self.rank), strict=True):
            if not (arrived[fragment.index] and parameter.requires_grad):
                continue
            part = reduced[fragment.in_shard.as_slice()]
            if parameter.grad is None:
                parameter.grad = part
            else:
                parameter.grad += part
