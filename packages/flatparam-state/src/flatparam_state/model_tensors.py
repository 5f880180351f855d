"""The tensors of a sharded model as this rank holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import final

import attrs
import torch
from torch import Tensor, nn

from flatparam_runtime import FlatParamError, Span, clean_fqn
from flatparam_state.places import Place, mesh_groups, places_in


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
    offset: int = 0
    """Of a `DTensor`, the elements before this rank's part, in memory order; `span` counts them."""
    part_shape: tuple[int, ...] | None = None
    """Of a `DTensor`, the shape of this rank's part."""
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

    def put(self, staged: Tensor) -> None:
        """Take new values: 1-D, the elements `span` in the order of `stride`."""
        with torch.no_grad():
            self.local.copy_(staged.view(self.local.shape))


def model_tensors(model: nn.Module, *, on_meshes: bool = False) -> list[ModelTensor]:
    """Return every parameter and persistent buffer of `model`, once each, in the order of its modules.

    Args:
        on_meshes: also parameters that are `DTensor`s, of which ranks of tensor parallelism have other parts.

    Raises:
        FlatParamError: for a `DTensor`, unless `on_meshes`, and for one that is cut along several dimensions.
    """
    places = list(places_in(model))
    # A parameter that is no `DTensor` is the same on all ranks of tensor parallelism.
    is_copy = any(group.rank for group in mesh_groups(place.unit for place in places))
    found = [tensor for place in places for tensor in _sharded(place, on_meshes, is_copy)]
    found += _whole(model, {id(place.handle.flat_param) for place in places}, found)
    return found


def _sharded(place: Place, on_meshes: bool, is_copy: bool) -> Iterator[ModelTensor]:
    handle, meshes = place.handle, place.handle.forms.meshes
    handle.take_over()
    shard = handle.flat_param.detach()
    for index, (slot, names) in enumerate(zip(handle.layout.slots, place.names, strict=True)):
        spec, fragment = slot.spec, handle.layout.fragment(index, handle.rank)
        form = None if meshes is None else meshes.form(handle, index)
        if form is not None and not on_meshes:
            raise FlatParamError(
                f"parameter {names[0]!r} is a DTensor, of which ranks of tensor parallelism have other parts; "
                "save what flatparam.checkpoint.state_dict.get_state_dict() gives with torch.distributed.checkpoint"
            )
        tensor = ModelTensor(
            names,
            spec.shape,
            spec.dtype,
            fragment.in_param,
            shard[fragment.in_shard.as_slice()],
            place,
            None if _is_row_major(spec.shape, spec.stride) else spec.stride,
            is_copy=is_copy,
        )
        if form is not None:
            held = form.held(names[0])
            span = fragment.in_param.shifted(held.offset)
            stride = None if _is_row_major(held.shape, held.stride) else held.stride
            of_part = {"offset": held.offset, "part_shape": spec.shape, "is_copy": held.is_copy}
            tensor = attrs.evolve(tensor, shape=held.shape, span=span, stride=stride, **of_part)
        yield tensor


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return 0 in shape
        step *= size
    return True


def _whole(model: nn.Module, flat: set[int], sharded: list[ModelTensor]) -> Iterator[ModelTensor]:
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(clean_fqn(path))
    taken = {name for tensor in sharded for name in tensor.names}
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        for attribute, tensor in _own_tensors(module):
            clean = [_join(path, attribute) for path in paths[module]]
            if id(tensor) not in flat and clean[0] not in taken:
                names.setdefault(id(tensor), []).extend(clean)
                tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        span = Span(0, tensor.numel())
        yield ModelTensor(
            tuple(dict.fromkeys(names[key])), tuple(tensor.shape), tensor.dtype, span, tensor.detach()
        )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
