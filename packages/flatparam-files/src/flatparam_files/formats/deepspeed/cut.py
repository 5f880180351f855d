"""A tensor that lies in parts, cut by DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import attrs
from torch import Tensor

from flatparam_core import Span
from flatparam_files.formats.stored import Storage, Stored, StridedTensor

__all__ = ["CutTensor"]


@final
# Two names are of one tensor if they share the object.
@attrs.frozen(eq=False)
class CutTensor(Stored):
    """A tensor that lies in parts: its element `i` is number `origin + i` of a row, the row is cut every `each`
    elements, and piece `k` of it begins at element `at` of `parts[k]`.
    """

    parts: tuple[StridedTensor, ...]
    each: int
    origin: int = 0
    at: int = 0

    @classmethod
    def whole(cls, stored: StridedTensor) -> CutTensor:
        """A tensor that lies in one piece."""
        return cls(stored.info, (stored,), max(1, stored.info.numel))

    def pieces(self, span: Span) -> Iterator[tuple[int, Span]]:
        """The parts that the elements `span` of the tensor lie in, by number, and where in them."""
        row = span.shifted(self.origin)
        for k in range(row.start // self.each, -(-row.stop // self.each)):
            inside = row.overlap(Span(k * self.each, (k + 1) * self.each))
            if inside:
                yield k, inside.relative_to(k * self.each).shifted(self.at)

    def read(self, span: Span) -> Iterator[Tensor]:
        """See `Stored.read`."""
        for k, inside in self.pieces(span):
            yield from self.parts[k].read(inside)

    def storages(self) -> Iterator[Storage]:
        """See `Stored.storages`."""
        return (part.storage for part in self.parts)

    def check(self) -> CutTensor:
        """The same, when all its elements are there, in one dtype."""
        for k, inside in self.pieces(Span(0, self.info.numel)):
            if k >= len(self.parts) or inside.stop > self.parts[k].info.numel:
                raise ValueError("the flat groups are too small for the parameters that they should hold")
            if self.parts[k].info.dtype != self.info.dtype:
                raise ValueError("the ranks hold a parameter in different dtypes")
        return self
