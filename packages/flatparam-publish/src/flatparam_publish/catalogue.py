"""The published tensors of a model, under the names and in the dtype that the receiver wants."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, final

import attrs
import torch
from torch import nn
from typing_extensions import Self

from flatparam_files import DTYPES, TensorInfo
from flatparam_files.disk.limits import parse_json
from flatparam_files.disk.source import renamed
from flatparam_publish.publish_error import PublishError
from flatparam_state.model_tensors import ModelTensor, model_tensors

ReceiverNames: TypeAlias = Mapping[str, str] | Callable[[str], str | None]
"""From a tensor's name in the model to the receiver's name; None, or an absent key of a mapping, keeps the name."""

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@final
@attrs.frozen
class PublishedTensor:
    """One tensor as the receiver has it. Its elements are counted in the memory order of `order`."""

    names: tuple[str, ...]
    """Its name, and then the other names of a tied parameter."""
    info: TensorInfo
    order: tuple[int, ...] = ()
    """The dimensions from the outermost in memory to the innermost; empty for row-major ones."""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions from the outermost in memory to the innermost."""
        return self.order or tuple(range(len(self.info.shape)))

    def with_shape(self, shape: Sequence[int]) -> PublishedTensor:
        """Return the same tensor with different sizes."""
        return attrs.evolve(self, info=TensorInfo(shape, self.info.dtype))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor whose elements are `flat`: 1-D, in the memory order of this tensor, its dtype."""
        sizes = [self.info.shape[dim] for dim in self.dims]
        inverse = sorted(range(len(sizes)), key=lambda place: self.dims[place])
        return flat.view(sizes).permute(inverse)


@final
# Without slots it has a dict, which the cached property needs.
@attrs.frozen(slots=False)
class Catalogue:
    """The tensors of a publication, in its order."""

    tensors: tuple[PublishedTensor, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.info.nbytes for tensor in self.tensors)

    def encode(self) -> bytes:
        """Return it as JSON."""
        rows = [
            [list(each.names), list(each.info.shape), DTYPES[each.info.dtype], list(each.order)]
            for each in self.tensors
        ]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()

    @cached_property
    def digest(self) -> str:
        """The sha256 of its JSON."""
        return hashlib.sha256(self.encode()).hexdigest()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the catalogue of which `encode` made these bytes.

        Raises:
            PublishError: if it is damaged.
        """
        try:
            return cls(tuple(_tensor(row) for row in parse_json(data)))
        except (ValueError, TypeError, LookupError) as error:
            raise PublishError(f"the list of published tensors is damaged: {error}") from error


def _tensor(row: Any) -> PublishedTensor:
    names, shape, dtype, order = row
    if not (isinstance(names, list) and names and all(type(size) is int and size >= 0 for size in shape)):
        raise ValueError(f"{row!r} describes no tensor")
    if order and sorted(order) != list(range(len(shape))):
        raise ValueError(f"{names}: expected an order of {len(shape)} dimensions, found {order}")
    return PublishedTensor(tuple(map(str, names)), TensorInfo(shape, _DTYPES[dtype]), tuple(order))


def published_tensors(
    model: nn.Module, names: ReceiverNames | None, dtype: torch.dtype | None, only: Callable[[str], bool] | None = None
) -> list[tuple[ModelTensor, PublishedTensor]]:
    """Return the tensors of `model` that are published, each with its form on the receiver.

    Args:
        names: what tensors are called there, if not as in the model.
        dtype: of floating-point tensors there; None keeps that of each.
        only: which tensors are published, by a name in the model; None publishes all.

    Raises:
        ValueError: if two tensors get one name, none is published, or `dtype` is not a floating-point one.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"publish: expected a floating-point dtype, found {dtype}")
    chosen = [each for each in model_tensors(model) if only is None or any(map(only, each.names))]
    if only is not None and not chosen:
        raise ValueError(
            "publish: expected only= to accept some of the tensors of the model, found that it accepts none"
        )
    found = [(tensor, _published(tensor, names, dtype)) for tensor in chosen]
    owners: dict[str, str] = {}
    for tensor, published in found:
        if published.info.dtype not in DTYPES:
            raise ValueError(
                f"publish: {tensor.name!r} has dtype {published.info.dtype}, which cannot be published; pass dtype="
            )
        for name in published.names:
            if owners.setdefault(name, tensor.name) != tensor.name:
                raise ValueError(f"publish: {owners[name]!r} and {tensor.name!r} both become {name!r}; check names=")
    return found


def _published(tensor: ModelTensor, names: ReceiverNames | None, dtype: torch.dtype | None) -> PublishedTensor:
    new_names = tuple(dict.fromkeys(renamed(name, names) for name in tensor.names))
    own = tensor.dtype
    info = TensorInfo(tensor.shape, dtype if dtype is not None and own.is_floating_point else own)
    stride = tensor.stride
    if stride is None:
        return PublishedTensor(new_names, info)
    # Dimensions of one element lie anywhere.
    order = sorted(range(len(stride)), key=lambda dim: (-stride[dim], -info.shape[dim], dim))
    return PublishedTensor(new_names, info, tuple(order))
