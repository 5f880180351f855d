"""A sharded module that lists its flat parameter: `use_orig_params=False`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import final

import attrs
import torch
from torch import nn

from flatparam_core.exposure.bindings import BoundParameter, ParamInfo
from flatparam_core.exposure.protocol import fragment_view, memory_of, new_values
from flatparam_core.exposure.sites import Sites
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.geometry import Fragment, ShardPieces
from flatparam_core.storage import add_to_grad, give_data

__all__ = ["FlatExposure"]


@final
@attrs.define(eq=False)
class _Follower:
    """An original parameter that somebody still holds, most likely an optimizer that was made before sharding.

    The parameter is a view of the shard, and its `.grad` is a view of the flat parameter's.
    """

    parameter: nn.Parameter
    fragment: Fragment
    given: bool = False
    """Whether the parameter was given a gradient since its `.grad` was None."""


@final
@attrs.define(eq=False)
class FlatExposure:
    """`parameters()` lists the flat parameter; the original names show plain 1-D views of the shard."""

    flat_param: FlatParameter
    owner: weakref.ReferenceType[nn.Module]
    attribute: str
    """The name under which the owner registers the flat parameter."""
    _sites: Sites
    _originals: list[weakref.ReferenceType[nn.Parameter]]
    _versions: list[int]
    """The version of each original when it was sharded."""
    _views: tuple[torch.Tensor, ...] = ()
    _followers: dict[int, _Follower] | None = None
    """The originals that outlived sharding, by index; they are found at the first gather."""

    @classmethod
    def attach(
        cls, owner: nn.Module, attribute: str, flat_param: FlatParameter, bound: Sequence[BoundParameter]
    ) -> FlatExposure:
        """Register `flat_param` in `owner` and take the original parameters out of their modules."""
        exposure = cls(flat_param, weakref.ref(owner), attribute, Sites.of(bound), [], [])
        exposure._make_views({index: b.parameter for index, b in enumerate(bound)})
        exposure._originals += [weakref.ref(b.parameter) for b in bound]
        exposure._versions += [b.parameter._version for b in bound]
        owner.register_parameter(attribute, flat_param)
        exposure.show_shard()
        return exposure

    def __getstate__(self) -> tuple[object, ...]:
        """Return the state for a copy; nobody holds the originals of a copy."""
        return self.flat_param, self.owner(), self.attribute, self._sites

    def __setstate__(self, state: tuple[FlatParameter, nn.Module, str, Sites]) -> None:
        """Restore a copy, which shows nothing yet; see `FlatParamHandle.revive`."""
        flat_param, owner, attribute, sites = state
        type(self).__init__(self, flat_param, weakref.ref(owner), attribute, sites, [], [])

    def _make_views(self, originals: Mapping[int, nn.Parameter]) -> None:
        layout, rank = self.flat_param.flat_layout, self.flat_param.rank
        pieces = ShardPieces.of(layout, rank)
        self._views = tuple(pieces.lines(self.flat_param.detach()))
        for index, original in originals.items():
            # This gradient is a full one; what is added from now on has the fragment's shape.
            original.grad = None
            give_data(original, self._views[index].view(pieces.shapes[index]))

    @property
    def infos(self) -> Sequence[tuple[ParamInfo, ...]]:
        """See `Exposure.infos`."""
        return self._sites.infos

    @property
    def is_dormant(self) -> bool:
        """See `Exposure.is_dormant`."""
        return not self._views

    def parameters(self) -> Sequence[nn.Parameter]:
        """See `Exposure.parameters`."""
        return (self.flat_param,)

    def originals(self) -> Mapping[int, nn.Parameter]:
        """See `Exposure.originals`."""
        alive = ((index, reference()) for index, reference in enumerate(self._originals))
        return {index: parameter for index, parameter in alive if parameter is not None}

    def follow(self, index: int) -> nn.Parameter:
        """See `Exposure.follow`. One that is made now has the gradient that the flat parameter has."""
        found = self._originals[index]()
        if found is not None:
            return found
        shape = ShardPieces.of(self.flat_param.flat_layout, self.flat_param.rank).shapes[index]
        parameter = nn.Parameter(torch.empty_like(self._views[index]), self.flat_param.requires_grad)
        give_data(parameter, self._views[index].view(shape))
        followers = self._find_followers()
        followers[index] = _Follower(
            parameter, self.flat_param.flat_layout.fragment(index, self.flat_param.rank)
        )
        self._originals[index], self._versions[index] = weakref.ref(parameter), parameter._version
        self._share_grad(followers[index])
        return parameter

    def requires_grad(self) -> Sequence[bool]:
        """See `Exposure.requires_grad`."""
        return [self.flat_param.requires_grad] * len(self._views)

    @property
    def is_trainable(self) -> bool:
        """See `Exposure.is_trainable`."""
        return self.flat_param.requires_grad

    def stamp(self) -> int:
        """See `Exposure.stamp`."""
        if self._followers is None:
            held = self.originals()
        elif self._followers:
            held = {index: follower.parameter for index, follower in self._followers.items()}
        else:
            return self.flat_param._version
        changes = sum(parameter._version - self._versions[index] for index, parameter in held.items())
        return self.flat_param._version + changes

    def take_over(self) -> Mapping[int, nn.Parameter]:
        """See `Exposure.take_over`; replacements in a module are refused when the full parameters are shown."""
        followers = self._find_followers()
        if not followers:
            return {}
        moved = {i: f for i, f in followers.items() if memory_of(f.parameter) != memory_of(self._views[i])}
        parts = {
            index: new_values(self.flat_param, index, follower.parameter, self._sites.infos[index][0].fqn)
            for index, follower in moved.items()
        }
        for index, follower in moved.items():
            self.flat_param.detach()[follower.fragment.in_shard.as_slice()].copy_(parts[index])
            follower.parameter.data = fragment_view(
                self.flat_param.data, self.flat_param.flat_layout, follower.fragment
            )
        return {index: follower.parameter for index, follower in moved.items()}

    def lend(self, index: int, infos: Sequence[ParamInfo]) -> None:
        """See `Exposure.lend`."""
        self._sites.add(index, infos)
        if self._sites.shown[index] is None:
            for info in infos:
                info.module.__dict__[info.param_name] = self._views[index]

    def refresh(self) -> None:
        """See `Exposure.refresh`."""
        self._make_views(self.originals())
        self.show_shard()

    def show(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """See `Exposure.show`."""
        for module, name in self._sites.put(tensors):
            module.__dict__.pop(name, None)

    def show_shard(self) -> None:
        """See `Exposure.show_shard`."""
        # The registered entry becomes None, which parameters() passes over and which keeps its place in the order; the
        # plain view in the instance dict is what the attribute then reads: right dtype and device, and safe to touch.
        places = self._sites.put((None,) * len(self._views))
        for (module, name), view in zip(places, self._sites.at_attributes(self._views), strict=True):
            module.__dict__[name] = view

    def put_back(self, indices: Sequence[int] | None = None) -> None:
        """See `Exposure.put_back`."""
        self._sites.put_back(indices)

    def replacements(self) -> Mapping[int, nn.Parameter]:
        """See `Exposure.replacements`."""
        return self._sites.replacements()

    @property
    def lists_shard(self) -> bool:
        """See `Exposure.lists_shard`."""
        return True

    def list_flat_parameter(self, listed: bool) -> None:
        """See `Exposure.list_flat_parameter`."""
        owner = self.owner()
        if owner is not None:
            owner._parameters[self.attribute] = self.flat_param if listed else None

    def add_gradient(self, reduced: torch.Tensor, arrived: Sequence[int]) -> None:
        """See `Exposure.add_gradient`."""
        if not any(arrived):
            return
        followers = self._find_followers()
        grad = self.flat_param.grad
        for follower in followers.values():
            # The module's zero_grad() was called.
            if grad is None:
                follower.parameter.grad = None
            # The zero_grad() of the follower's optimizer was called.
            elif follower.given and follower.parameter.grad is None:
                grad[follower.fragment.in_shard.as_slice()].zero_()
        add_to_grad(self.flat_param, reduced)
        for index, follower in followers.items():
            follower.given = follower.given and follower.parameter.grad is not None
            if arrived[index]:
                self._share_grad(follower)

    def _find_followers(self) -> dict[int, _Follower]:
        if self._followers is None:
            layout, rank = self.flat_param.flat_layout, self.flat_param.rank
            self._followers = {
                index: _Follower(parameter, layout.fragment(index, rank))
                for index, parameter in self.originals().items()
            }
        return self._followers

    def _share_grad(self, follower: _Follower) -> None:
        grad, parameter = self.flat_param.grad, follower.parameter
        if grad is not None:
            if parameter.grad_dtype != grad.dtype:
                parameter.grad_dtype = grad.dtype
            parameter.grad = fragment_view(grad, self.flat_param.flat_layout, follower.fragment)
            follower.given = True
