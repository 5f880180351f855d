"""Half-open integer intervals, the only interval arithmetic of the project."""

from __future__ import annotations

from typing import final

import attrs
from typing_extensions import Self

from flatparam_core.errors import LayoutError

__all__ = ["Span"]


@final
@attrs.frozen(order=True)
class Span:
    """The integers `start <= i < stop`; empty if `start == stop`. Units: elements."""

    start: int
    stop: int

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise LayoutError(f"a span needs 0 <= start <= stop, found [{self.start}, {self.stop})")

    @property
    def numel(self) -> int:
        """The number of integers in the span."""
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start

    def overlap(self, other: Span) -> Span:
        """The part common to both, in the coordinates of both; empty if they do not meet."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def relative_to(self, origin: int) -> Self:
        """The same integers counted from `origin` (which must not lie behind `start`)."""
        return type(self)(self.start - origin, self.stop - origin)

    def shifted(self, offset: int) -> Self:
        """The span moved `offset` to the right."""
        return type(self)(self.start + offset, self.stop + offset)

    def contains(self, other: Span) -> bool:
        """Whether every integer of `other` lies in this span (an empty one must lie within the ends)."""
        return self.start <= other.start and other.stop <= self.stop

    def as_slice(self) -> slice:
        """The span as an index for a 1-D tensor."""
        return slice(self.start, self.stop)
