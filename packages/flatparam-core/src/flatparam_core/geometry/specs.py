"""One parameter as a layout sees it, and the rules that say what of it stays on one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final, Literal, final

import attrs
import torch
from typing_extensions import Self

from flatparam_core.errors import LayoutError


@final
@attrs.frozen
class LayoutRule:
    """The piece of one parameter that stays on one rank: `ELEMENT`, `block_of(k)`, `ROW`, `CHUNK` or `WHOLE`.

    A boundary between two ranks lies at a multiple of the rule's grain, counted in elements from the parameter's
    first one in memory order, or it does not cut the parameter.
    """

    kind: Literal["element", "block", "row", "chunk", "whole"]
    block_numel: int = 1
    """The elements of a block; 1 for the other kinds."""

    def __attrs_post_init__(self) -> None:
        if self.kind not in ("element", "block", "row", "chunk", "whole"):
            raise LayoutError(
                f"a layout rule is one of 'element', 'block', 'row', 'chunk' and 'whole', found {self.kind!r}"
            )
        if type(self.block_numel) is not int:
            raise LayoutError(f"a layout rule has blocks of a whole number of elements, found {self.block_numel!r}")
        if self.block_numel < 1 or (self.block_numel > 1 and self.kind != "block"):
            raise LayoutError(
                f"a rule of kind {self.kind!r} cannot have blocks of {self.block_numel} elements; those of a rule "
                "'block' have at least 1, and other rules have none"
            )

    def __str__(self) -> str:
        return f"block of {self.block_numel}" if self.kind == "block" else self.kind

    def grain(self, shape: Sequence[int], stride: Sequence[int]) -> int:
        """Return the elements that stay together, at least 1 and at most all.

        A row is what one index of the first dimension selects. If its elements do not lie side by side in memory, as
        in a transposed weight, the whole tensor stays together.

        Args:
            shape: the parameter's.
            stride: its dense strides, in elements.
        """
        numel = math.prod(shape)
        if self.kind in ("row", "chunk"):
            row = _row_numel(shape, stride, numel)
        else:
            row = numel if self.kind == "whole" else self.block_numel
        return max(1, min(row, numel))


def _row_numel(shape: Sequence[int], stride: Sequence[int], numel: int) -> int:
    if not shape or not numel:
        return 1
    row = numel // shape[0]
    # The strides are dense, so the first dimension is the outermost one in memory exactly if it steps over a row.
    return row if stride[0] == row else numel


ELEMENT: Final = LayoutRule("element")
"""A boundary between ranks may lie anywhere."""
ROW: Final = LayoutRule("row")
"""Each index of the first dimension stays on one rank; of a 1-D parameter, each element."""
CHUNK: Final = LayoutRule("chunk")
"""Each rank has the chunk of the first dimension that `torch.chunk` would give it, as with torch's `fully_shard`."""
WHOLE: Final = LayoutRule("whole")
"""The parameter stays on one rank."""


def block_of(numel: int) -> LayoutRule:
    """Return the rule that `numel` elements in a row, counted from the parameter's first one, stay on one rank.

    Each parameter begins at a multiple of `numel` in the shard, and each shard has a multiple of `numel` elements, so
    that blocks counted from the beginning of a shard are those counted from the beginning of each parameter.

    Raises:
        LayoutError: if `numel` is no integer of at least 1.
    """
    return LayoutRule("block", numel)


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
    stride: tuple[int, ...] = attrs.Factory(lambda self: contiguous_stride(self.shape), takes_self=True)
    aliases: tuple[str, ...] = ()
    rule: LayoutRule = ELEMENT

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
