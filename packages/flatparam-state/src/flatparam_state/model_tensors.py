"""The tensors of a sharded model as this rank holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_runtime import FlatParamError, Span, clean_fqn
from flatparam_state.forms.chunker import is_dtensor
from flatparam_state.places import Place, check_names, held_part, mesh_groups, places_in


@final
@attrs.frozen(eq=False)
class ModelTensor:
    """A parameter or buffer, and what this rank has of it.

    `local` are the elements `span` (in the memory order of `stride`; row-major if that is None) as a view: writing
    to it changes the model. Of a tensor that is not sharded it is the tensor itself.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    span: Span
    local: Tensor
    place: Place | None = None
    stride: tuple[int, ...] | None = None
    held: Any = None
    """Of a `DTensor`, the part of it that this rank has, `HeldPart` of flatparam-meshes; `span` counts earlier ones."""
    is_copy: bool = False
    """Whether a different rank of tensor parallelism has the same elements, and saves them."""

    @property
    def name(self) -> str:
        """The first of its names; the others are aliases."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """The elements of the whole tensor."""
        return math.prod(self.shape)

    def intervals(self, span: Span) -> list[Span]:
        """Return where some of the elements `span` lie in the whole tensor, in the memory order of `stride`."""
        return [span] if self.held is None else self.held.intervals(span)

    def put(self, staged: Tensor) -> None:
        """Take new values: 1-D, the elements `span` in the order of `stride`."""
        with torch.no_grad():
            self.local.copy_(staged.view(self.local.shape))


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return every parameter and persistent buffer of `model`, once each, in the order of its modules.

    Raises:
        FlatParamError: for a parameter of which other ranks may hold other values under its name; see `check_names`.
    """
    places = list(places_in(model))
    check_names(places)
    found = [tensor for place in places for tensor in _sharded(place, places)]
    found += _whole(model, {id(place.handle.flat_param) for place in places}, found)
    return found


def _sharded(place: Place, places: Sequence[Place]) -> Iterator[ModelTensor]:
    handle = place.handle
    handle.take_over()
    shard = handle.flat_param.detach()
    # What is no `DTensor` is the same on all ranks of tensor parallelism.
    apart = (*place.unit.topology.groups, getattr(handle.forms.meshes, "experts", None))
    is_copy = any(group.rank for group in mesh_groups((each.unit for each in places), apart))
    for index in place.indices:
        spec, fragment = handle.layout.slots[index].spec, handle.layout.fragment(index, handle.rank)
        held = held_part(place, index)
        shape, stride = (spec.shape, spec.stride) if held is None else (held.shape, held.stride)
        yield ModelTensor(
            place.names[index],
            shape,
            spec.dtype,
            fragment.in_param.shifted(0 if held is None else held.offset),
            shard[fragment.in_shard.as_slice()],
            place,
            None if _is_row_major(shape, stride) else stride,
            held,
            is_copy if held is None or held.is_copy is None else held.is_copy,
        )


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return 0 in shape
        step *= size
    return True


def _whole(model: nn.Module, flat: set[int], sharded: list[ModelTensor]) -> Iterator[ModelTensor]:
    taken = {name for tensor in sharded for name in tensor.names}
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kept = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for attribute, tensor in {**module._parameters, **kept}.items():
            name = clean_fqn(f"{path}.{attribute}" if path else attribute)
            if tensor is not None and id(tensor) not in flat and name not in taken:
                found.setdefault(id(tensor), (tensor, []))[1].append(name)
    for tensor, names in found.values():
        span = Span(0, tensor.numel())
        if sharded and is_dtensor(tensor):
            raise FlatParamError(
                f"parameter {names[0]!r} is a DTensor that no unit holds: shard its module, too (do not ignore it)"
            )
        yield ModelTensor(tuple(dict.fromkeys(names)), tuple(tensor.shape), tensor.dtype, span, tensor.detach())
