"""The rules that say what of a parameter stays on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, final

import attrs

from flatparam_core.errors import LayoutError

__all__ = ["CHUNK", "ELEMENT", "ROW", "WHOLE", "LayoutRule", "block_of"]


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
            raise LayoutError(
                f"a layout rule has blocks of a whole number of elements, found {self.block_numel!r}"
            )
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
