"""The protocol of what a sharded module shows under its parameters' names, and of what `parameters()` lists.

Two classes implement it: `FlatExposure` (`use_orig_params=False`) and `OriginalExposure` (`True`). Both show
the full parameters, as leaves, while the unit is unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import nn

from flatparam_core.errors import FlatParamError
from flatparam_core.exposure.bindings import ParamInfo
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.geometry import FlatLayout, Fragment, ParamSpec, fragment_shape, memory_view

Memory: TypeAlias = tuple[int, int]
"""The memory of a tensor: its address, and its number of elements."""


class Faces(Protocol):
    """Makes parameters that modules show in the place of originals while they are sharded, such as `DTensor`s."""

    def make(self, original: nn.Parameter, spec: ParamSpec) -> nn.Parameter:
        """Return the face of `original`, this rank's part of a parameter: it has the same memory, and its gradient."""

    def follow(self, face: nn.Parameter, original: nn.Parameter) -> None:
        """Have `face` use the memory that `original` has now."""

    def own_part(self, given: nn.Parameter) -> nn.Parameter:
        """Return this rank's part of what somebody has put in the place of a face; or what was given."""

    def adopt(self, given: nn.Parameter, face: nn.Parameter) -> nn.Parameter:
        """Return the face to show now that `given` was put in the place of `face`: `given` itself, if it can be one."""

    def lost(self, faces: Sequence[nn.Parameter]) -> Sequence[int]:
        """Return the indices of what is no face any more: `to()` of a module may turn it into another tensor."""

    def original(self, face: nn.Parameter) -> nn.Parameter:
        """Return what `face` stands for; it is another unit's, if a face of that unit was put in two places."""


class Exposure(Protocol):
    """The tensors under the parameters' names while a unit is sharded, and the place where its gradients appear."""

    @property
    def infos(self) -> Sequence[tuple[ParamInfo, ...]]:
        """For each parameter, the module attributes that hold it."""

    @property
    def is_dormant(self) -> bool:
        """Whether this is a copy that its modules do not show yet; `refresh` ends that state."""

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the leaves that an optimizer holds; they live as long as the unit."""

    def listed(self) -> Sequence[nn.Parameter]:
        """Return what modules list for `parameters()`, one for one."""

    def originals(self) -> Mapping[int, nn.Parameter]:
        """Return the original parameters that are views of the shard and that somebody still holds, by index."""

    def follow(self, index: int) -> nn.Parameter:
        """Return the original parameter `index`, a view of the shard; made anew if nobody holds it any more."""

    def requires_grad(self) -> Sequence[bool]:
        """For each parameter of the layout, whether it is to get a gradient now."""

    @property
    def is_trainable(self) -> bool:
        """Whether some parameter is to get a gradient now."""

    def take_over(self) -> Mapping[int, nn.Parameter]:
        """Take over data that the user has given a parameter since (`.data =`, or a new object).

        If there are any, the flat parameter gets new memory with them, so that whoever kept the old memory, such as
        `keep = parameter.data`, still has the old values; the caller then follows it, and calls `refresh`.

        Returns:
            By index, the originals before they were taken over; each may be the same object with other data.

        Raises:
            FlatParamError: if the data do not fit; the message names the parameter, and nothing has changed.
        """

    @property
    def was_given_data(self) -> bool:
        """Whether the user has given an original other data since `take_over` (`.data =`), which it will copy."""

    def lend(self, index: int, infos: Sequence[ParamInfo]) -> None:
        """Show parameter `index` under the names `infos` of another unit's modules too."""

    def refresh(self) -> None:
        """Follow the flat parameter to its new memory, after it was moved or cast."""

    reading: Callable[[int], torch.Tensor | None] | None
    """Is asked at each read of an attribute while the sharded form is shown, if a runtime sets it: returns the full
    parameter if the reader is to see that, or None."""

    def show(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Put full tensors (or `None`) under the parameters' names, as registered parameters."""

    def shown(self, index: int) -> torch.Tensor | None:
        """Return the tensor under the names of parameter `index`, as `show` was given it."""

    def stamp(self) -> int:
        """Return a number that grows with every in-place change of the shard, through any tensor."""

    def show_shard(self) -> None:
        """Put the sharded form back under the parameters' names; see `reading` for what attributes show."""

    def put_back(self, indices: Sequence[int] | None = None) -> None:
        """Have the module show again what `show` was given last, if somebody has replaced a parameter since.

        Args:
            indices: the parameters to look at; by default all.
        """

    def replacements(self) -> Mapping[int, nn.Parameter]:
        """By index, the parameters that fit, and that somebody has put in the places of those that `show` was given."""

    @property
    def lists_shard(self) -> bool:
        """Whether `module.parameters()` lists the shard beside the full parameters that are shown."""

    @property
    def hides_shard(self) -> bool:
        """Whether `module.parameters()` leaves the flat parameter out now, so that only full parameters are there."""

    def list_flat_parameter(self, listed: bool) -> None:
        """Make `module.parameters()` list the flat parameter, or not; do nothing if it never does."""

    def add_gradient(self, reduced: torch.Tensor, arrived: Sequence[int]) -> None:
        """Add the reduced gradient of the shard to `.grad`.

        Args:
            reduced: 1-D, `layout.shard_numel` elements, on the shard's device; the exposure keeps it. A dtype other
                than the shard's becomes that of `.grad`.
            arrived: for each parameter, non-zero if some rank had a gradient; the other parameters keep their `.grad`,
                as do originals of which other ranks have all elements.
        """


def fragment_view(flat: torch.Tensor, layout: FlatLayout, fragment: Fragment) -> torch.Tensor:
    """The part of a parameter that a shard holds, as a view of the shard's memory `flat`, in its `fragment_shape`."""
    return flat[fragment.in_shard.as_slice()].view(fragment_shape(layout, fragment))


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the memory of `tensor`."""
    return tensor.data_ptr(), tensor.numel()


def new_values(flat_param: FlatParameter, index: int, given: torch.Tensor) -> torch.Tensor:
    """Return the data that the user gave the original parameter `index` after sharding, as the rank's 1-D part of them.

    Raises:
        FlatParamError: if shape, dtype or device do not fit.
    """
    layout = flat_param.flat_layout
    fragment, spec = layout.fragment(index, flat_param.rank), layout.slots[index].spec
    view = fragment_view(flat_param.data, layout, fragment)
    if given.dtype != view.dtype or given.device != view.device:
        raise FlatParamError(
            f"parameter {spec.fqn!r} was given other data after its module was sharded: expected {view.dtype} on "
            f"{view.device}, found {given.dtype} on {given.device}; move or cast the whole wrapped module instead"
        )
    shape = tuple(given.shape)
    if shape == spec.shape:
        part = memory_view(given, spec)[fragment.in_param.as_slice()]
    elif shape in (tuple(view.shape), (view.numel(),)):
        part = given.detach().reshape(-1)
    else:
        raise FlatParamError(
            f"parameter {spec.fqn!r} was given other data after its module was sharded: expected the full shape "
            f"{spec.shape} or this rank's part {tuple(view.shape)}, found {shape}; change its values "
            "in place instead, or inside summon_full_params()"
        )
    return part


def give_values(flat_param: FlatParameter, parts: Mapping[int, torch.Tensor]) -> None:
    """Give the flat parameter new memory, with its values but for `parts`: by index, 1-D parts of this rank."""
    fresh = flat_param.detach().clone()
    for index, part in parts.items():
        span = flat_param.flat_layout.fragment(index, flat_param.rank).in_shard
        fresh[span.as_slice()].copy_(part)
    flat_param.data = fresh
