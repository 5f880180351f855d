"""What a sharded module shows under its parameters' names, and what `parameters()` lists.

Two answers to one protocol: the flat parameter (`use_orig_params=False`), or the original parameters as views of the
shard (`use_orig_params=True`). Both show the full parameters, as leaves, while they are unsharded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import attrs
import torch
from torch import nn
from typing_extensions import Self, final

from flatparam_core.bindings import BoundParameter, ParamInfo, memory_view
from flatparam_core.errors import FlatParamError
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.layout import FlatLayout, Fragment
from flatparam_core.sites import Sites, replaced

__all__ = ["Exposure", "FlatExposure", "OriginalExposure"]


class Exposure(Protocol):
    """What stands under the parameters' names while a unit is sharded, and where its gradients appear."""

    def parameters(self) -> Sequence[nn.Parameter]:
        """What an optimizer holds: leaves that live as long as the unit."""
        ...

    def originals(self) -> Mapping[int, nn.Parameter]:
        """By index, the original parameters that are views of the shard, as far as anybody holds them."""
        ...

    def requires_grad(self) -> Sequence[bool]:
        """For each parameter of the layout, whether it is to get a gradient now."""
        ...

    def take_over(self) -> None:
        """Bring what the user gave a parameter since (`.data =`, or another object) into the shard.

        Raises:
            FlatParamError: where it does not fit, naming the parameter.
        """
        ...

    def lend(self, index: int, infos: Sequence[ParamInfo]) -> None:
        """Show parameter `index` under the names `infos` of another unit's modules too."""
        ...

    def refresh(self) -> None:
        """Follow the flat parameter to its new memory: it was moved or cast."""
        ...

    def show(self, tensors: Sequence[nn.Parameter | None]) -> None:
        """Put full tensors (or `None`) under the parameters' names, as registered parameters."""
        ...

    def stamp(self) -> int:
        """A number that grows with every in-place change of the shard, through whichever tensor."""
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
            reduced: 1-D, `layout.shard_numel` elements, on the shard's device; the exposure keeps it. A dtype other
                than the shard's becomes that of `.grad`.
            arrived: for each parameter, non-zero where some rank had a gradient; the others keep theirs, or `None`.
        """
        ...


def fragment_view(flat: torch.Tensor, layout: FlatLayout, fragment: Fragment) -> torch.Tensor:
    """The part of a parameter that a shard holds, as a view of the shard's memory `flat`.

    Its elements lie along the first dimension; the others are there, of length 1. So an optimizer's rule that asks for
    the number of dimensions (no weight decay below two) decides as on the full parameter.
    """
    dims = max(len(layout.slots[fragment.index].spec.shape), 1)
    part = flat[fragment.in_shard.as_slice()]
    return part.view(part.numel(), *(1,) * (dims - 1))


def add_to_grad(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add `gradient` (the parameter's shape) to `.grad`, which takes its dtype."""
    if parameter.grad is not None:
        parameter.grad += gradient
        return
    if gradient.dtype != parameter.dtype and parameter.grad_dtype != gradient.dtype:
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


@final
@attrs.define(eq=False)
class _Follower:
    """An original parameter that somebody still holds, most likely an optimizer that was made before sharding.

    It is a view of the shard, and its `.grad` one of the flat parameter's.
    """

    parameter: nn.Parameter
    fragment: Fragment
    given: bool = False
    """Whether it was given a gradient since its `.grad` was None."""


@final
@attrs.define(eq=False)
class FlatExposure:
    """`parameters()` lists the flat parameter; under the original names stand plain 1-D views of the shard."""

    flat_param: FlatParameter
    owner: weakref.ReferenceType[nn.Module]
    attribute: str
    """The name under which the owner registers the flat parameter."""
    _sites: Sites
    _originals: list[weakref.ReferenceType[nn.Parameter]]
    _views: tuple[torch.Tensor, ...] = ()
    _followers: dict[int, _Follower] | None = None
    """The originals that outlived sharding, by index; who they are is seen at the first gradient."""

    @classmethod
    def attach(
        cls, owner: nn.Module, attribute: str, flat_param: FlatParameter, bound: Sequence[BoundParameter]
    ) -> Self:
        """Register `flat_param` in `owner` and take the original parameters out of their modules."""
        originals = [weakref.ref(b.parameter) for b in bound]
        exposure = cls(flat_param, weakref.ref(owner), attribute, Sites.of(bound), originals)
        exposure._make_views()
        owner.register_parameter(attribute, flat_param)
        exposure.show_shard()
        return exposure

    def _make_views(self) -> None:
        layout, rank = self.flat_param.flat_layout, self.flat_param.rank
        self._views = tuple(
            self.flat_param.detach()[fragment.in_shard.as_slice()] for fragment in layout.fragments(rank)
        )
        for reference, fragment in zip(self._originals, layout.fragments(rank), strict=True):
            original = reference()
            if original is not None:
                original.grad = None  # a full one; what is added from now on has the fragment's shape
                original.data = fragment_view(self.flat_param.data, layout, fragment)

    def parameters(self) -> Sequence[nn.Parameter]:
        """See `Exposure.parameters`."""
        return (self.flat_param,)

    def originals(self) -> Mapping[int, nn.Parameter]:
        """See `Exposure.originals`."""
        alive = ((index, reference()) for index, reference in enumerate(self._originals))
        return {index: parameter for index, parameter in alive if parameter is not None}

    def requires_grad(self) -> Sequence[bool]:
        """See `Exposure.requires_grad`."""
        return (self.flat_param.requires_grad,) * len(self._views)

    def stamp(self) -> int:
        """See `Exposure.stamp`."""
        followers = self._followers.values() if self._followers else ()
        return self.flat_param._version + sum(follower.parameter._version for follower in followers)

    def take_over(self) -> None:
        """Nothing: what was replaced is refused when the full parameters are shown."""

    def lend(self, index: int, infos: Sequence[ParamInfo]) -> None:
        """See `Exposure.lend`."""
        self._sites.add(index, infos)
        if self._sites.shown[index] is None:
            for info in infos:
                info.module.__dict__[info.param_name] = self._views[index]

    def refresh(self) -> None:
        """See `Exposure.refresh`."""
        self._make_views()
        self.show_shard()

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
        followers = self._find_followers()
        grad = self.flat_param.grad
        if grad is not None:
            for follower in followers.values():
                if follower.given and follower.parameter.grad is None:  # its optimizer's zero_grad()
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


@final
@attrs.define(eq=False)
class OriginalExposure:
    """`parameters()` lists the original parameter objects, each a view of its part of the shard."""

    flat_param: FlatParameter
    _originals: list[nn.Parameter]
    _sites: Sites

    @classmethod
    def attach(cls, flat_param: FlatParameter, bound: Sequence[BoundParameter]) -> Self:
        """Turn the original parameters into views of the shard, once; optimizers that hold them go on working."""
        exposure = cls(flat_param, [b.parameter for b in bound], Sites.of(bound))
        for parameter in exposure._originals:
            parameter.grad = None  # a full one; what is added from now on has the fragment's shape
        exposure.refresh()
        return exposure

    def _fragments(self) -> Iterator[Fragment]:
        return self.flat_param.flat_layout.fragments(self.flat_param.rank)

    def _view(self, fragment: Fragment) -> torch.Tensor:
        return fragment_view(self.flat_param.data, self.flat_param.flat_layout, fragment)

    def parameters(self) -> Sequence[nn.Parameter]:
        """See `Exposure.parameters`."""
        return self._originals

    def originals(self) -> Mapping[int, nn.Parameter]:
        """See `Exposure.originals`."""
        return dict(enumerate(self._originals))

    def requires_grad(self) -> Sequence[bool]:
        """See `Exposure.requires_grad`."""
        return [parameter.requires_grad for parameter in self._originals]

    def stamp(self) -> int:
        """See `Exposure.stamp`."""
        return self.flat_param._version + sum(parameter._version for parameter in self._originals)

    def take_over(self) -> None:
        """See `Exposure.take_over`."""
        home = self.flat_param.untyped_storage()._cdata
        for index, (parameter, infos) in enumerate(zip(self._originals, self._sites.infos, strict=True)):
            found = infos[0].module._parameters.get(infos[0].param_name)
            if found is parameter and (not found.numel() or found.untyped_storage()._cdata == home):
                continue
            for info in infos:
                if info.module._parameters.get(info.param_name) is not found:
                    raise FlatParamError(
                        f"parameter {infos[0].fqn!r} was replaced after its module was sharded, but not under its "
                        f"other name {info.fqn!r}: which modules share a parameter cannot change any more"
                    )
            if found is None:
                raise replaced(infos[0])
            self._adopt(index, found, infos[0].fqn)

    def _adopt(self, index: int, found: nn.Parameter, fqn: str) -> None:
        layout = self.flat_param.flat_layout
        fragment, spec = layout.fragment(index, self.flat_param.rank), layout.slots[index].spec
        view = self._view(fragment)
        if found.dtype != view.dtype or found.device != view.device:
            raise FlatParamError(
                f"parameter {fqn!r} was given other data after its module was sharded: expected {view.dtype} on "
                f"{view.device}, found {found.dtype} on {found.device}; move or cast the whole wrapped module instead"
            )
        if tuple(found.shape) == spec.shape:
            part = memory_view(found, spec)[fragment.in_param.as_slice()]
        elif found.numel() == view.numel():
            part = found.detach().reshape(-1)
        else:
            raise FlatParamError(
                f"parameter {fqn!r} was given other data after its module was sharded: expected the full shape "
                f"{spec.shape} or this rank's part {tuple(view.shape)}, found {tuple(found.shape)}; change its values "
                "in place instead, or inside summon_full_params()"
            )
        self.flat_param.detach()[fragment.in_shard.as_slice()].copy_(part)
        found.data = view
        self._originals[index] = found
        self._sites.shown[index] = found

    def lend(self, index: int, infos: Sequence[ParamInfo]) -> None:
        """See `Exposure.lend`."""
        self._sites.add(index, infos)

    def refresh(self) -> None:
        """See `Exposure.refresh`."""
        for parameter, fragment in zip(self._originals, self._fragments(), strict=True):
            parameter.data = self._view(fragment)

    def show(self, tensors: Sequence[nn.Parameter | None]) -> None:
        """See `Exposure.show`."""
        self._sites.put(tensors)

    def show_shard(self) -> None:
        """See `Exposure.show_shard`."""
        self._sites.put(self._originals)

    def list_flat_parameter(self, listed: bool) -> None:
        """Nothing: it is never listed."""

    def add_gradient(self, reduced: torch.Tensor, arrived: Sequence[int]) -> None:
        """See `Exposure.add_gradient`."""
        layout = self.flat_param.flat_layout
        for parameter, fragment in zip(self._originals, self._fragments(), strict=True):
            if arrived[fragment.index] and parameter.requires_grad:
                add_to_grad(parameter, fragment_view(reduced, layout, fragment))
