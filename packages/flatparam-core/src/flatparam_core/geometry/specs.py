"""The facts about a parameter that geometry needs, without its bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import final

import attrs
import torch
from typing_extensions import Self

from flatparam_core.errors import LayoutError
from flatparam_core.geometry.rules import ELEMENT, LayoutRule

__all__ = ["ParamSpec", "memory_view"]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of `shape`, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the strides visit `prod(shape)` adjacent elements once each, in any order of the dimensions."""
    expected = 1
    for step, size in sorted((t, n) for n, t in zip(shape, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= size
    return True


@final
@attrs.frozen(cache_hash=True)
class ParamSpec:
    """One parameter as the layout sees it: name, shape, memory order and dtype.

    `stride` (in elements) is dense: a channels_last weight keeps its order in the flat parameter, and a tensor
    with gaps or overlaps is laid out row-major. `aliases` are the further names of a tied parameter. `rule` says what
    of it stays on one rank.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    stride: tuple[int, ...] = attrs.field()
    aliases: tuple[str, ...] = ()
    rule: LayoutRule = ELEMENT

    @stride.default
    def _row_major(self) -> tuple[int, ...]:
        return contiguous_stride(self.shape)

    def __attrs_post_init__(self) -> None:
        if self.stride != contiguous_stride(self.shape) and (
            len(self.stride) != len(self.shape) or (self.numel and not is_dense(self.shape, self.stride))
        ):
            raise LayoutError(
                f"parameter {self.fqn!r}: strides {self.stride} do not lay shape {self.shape} out densely"
            )
        if self.requires_grad and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise LayoutError(f"parameter {self.fqn!r}: dtype {self.dtype} cannot require a gradient")

    @classmethod
    def of(cls, fqn: str, tensor: torch.Tensor, aliases: Sequence[str] = ()) -> Self:
        """Return the spec of `tensor` (any shape, 0-d too); its strides are kept if they are dense."""
        facts = tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.stride()
        return _spec(fqn, *facts, tuple(aliases))

    @property
    def memory_order(self) -> tuple[int, ...]:
        """The strides that order elements: those of dimensions longer than 1, and none if the parameter is empty."""
        if not self.numel:
            return ()
        return tuple(step for size, step in zip(self.shape, self.stride, strict=True) if size > 1)

    @property
    def is_row_major(self) -> bool:
        """Whether the elements lie in the order of the indices, the last counting fastest."""
        order = zip(self.shape, contiguous_stride(self.shape), self.stride, strict=True)
        return not self.numel or all(size == 1 or step == own for size, step, own in order)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d parameter."""
        return math.prod(self.shape)

    @property
    def grain(self) -> int:
        """The elements that stay on one rank: a boundary between ranks cuts at multiples of this number only."""
        return self.rule.grain(self.shape, self.stride)

    @property
    def nbytes(self) -> int:
        """Size in bytes in the parameter's own dtype."""
        return self.numel * self.dtype.itemsize


@functools.lru_cache(maxsize=4096)
def _spec(
    fqn: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    stride: tuple[int, ...],
    aliases: tuple[str, ...],
) -> ParamSpec:
    """Return the spec of these facts: one object for equal facts, as those of the repeated blocks of a model are."""
    row_major = contiguous_stride(shape)
    if stride != row_major and (not math.prod(shape) or not is_dense(shape, stride)):
        stride = row_major
    return ParamSpec(fqn, shape, dtype, requires_grad, stride, aliases)


def memory_view(tensor: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """Return the elements of `tensor` (shape `spec.shape`) as a 1-D tensor in the memory order of `spec`.

    It is a view if the tensor already has that order, else a copy.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return tensor.reshape(0)
    if tuple(tensor.stride()) != spec.stride:
        ordered = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((spec.numel,), (1,), tensor.storage_offset())
