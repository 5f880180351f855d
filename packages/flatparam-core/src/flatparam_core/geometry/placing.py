"""The search for a place of each parameter, so that no boundary between ranks cuts what stays together.

The boundaries are all known once the longest shard is: all shards have its length, or their share of it. So the search
goes over lengths. For each it lays the parameters out, and it keeps the shortest that has room for all. It computes
with integers only, so every rank finds the same.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final, final

import attrs
from typing_extensions import Self

from flatparam_core.errors import LayoutError
from flatparam_core.geometry.specs import ParamSpec

_FINE: Final = 12
"""The search stops when the shortest length is known to one part in two to the power of this."""


@final
@attrs.frozen
class Placing:
    """The first element of each parameter in the flat parameter, and the elements of each rank's shard."""

    starts: tuple[int, ...]
    shard_numels: tuple[int, ...]


def place(specs: Sequence[ParamSpec], *, world_size: int, step: int = 1, shares: Sequence[float] = ()) -> Placing:
    """Find a place for each parameter, with little padding, as the rules of `specs` ask.

    Args:
        specs: the parameters; their order is kept if another one does not save padding.
        world_size: the ranks that share the flat parameter, at least 1.
        step: each parameter starts at a multiple of this many elements.
        shares: for each rank the weight of its part; empty if all are equal.
    """
    items = [_Item.of(index, spec, step) for index, spec in enumerate(specs)]
    solid = [item for item in items if item.numel]
    grids = _Grids(world_size, step, tuple(map(Fraction, shares)))
    if not solid:
        return Placing((0,) * len(specs), (0,) * world_size)
    orders = [_Order(solid, fills_gaps=False)]
    if any(item.grain > 1 for item in solid):
        orders.append(_Order(sorted(solid, key=_largest_first), fills_gaps=True))
    found = _shortest(solid, orders, grids)
    return Placing(tuple(found.starts.get(item.index, 0) for item in items), found.grid.shard_numels())


def check_shares(shares: Sequence[float], world_size: int) -> None:
    """Check that `shares` has a positive, finite weight for each rank, or is empty.

    Raises:
        LayoutError: if not; it says which rank's is wrong.
    """
    if shares and len(shares) != world_size:
        raise LayoutError(f"expected a share for each of the {world_size} ranks, found {len(shares)} shares")
    for rank, share in enumerate(shares):
        if not (math.isfinite(share) and share > 0):
            raise LayoutError(f"the share of rank {rank}: expected a positive number, found {share!r}")


def fewest_elements(specs: Sequence[ParamSpec], world_size: int) -> int:
    """Return a lower bound of the elements of an equal shard, whatever the order of the parameters."""
    items = [_Item.of(index, spec, 1) for index, spec in enumerate(specs)]
    return _fewest([item for item in items if item.numel], world_size)


@final
@attrs.frozen
class _Item:
    """A parameter to place: `grain` elements stay together, and it starts at a multiple of `step`."""

    index: int
    numel: int
    grain: int
    step: int

    @classmethod
    def of(cls, index: int, spec: ParamSpec, step: int) -> Self:
        own = spec.rule.block_numel
        return cls(index, spec.numel, spec.grain, math.lcm(step, own))

    @property
    def kind(self) -> tuple[int, int, int]:
        return self.numel, self.grain, self.step


def _largest_first(item: _Item) -> tuple[int, int, int, int]:
    return -item.numel, -item.grain, -item.step, item.index


def _fewest(items: Sequence[_Item], ranks: int) -> int:
    # Each rank has a multiple of what divides all pieces.
    piece = math.gcd(*(item.grain for item in items), *(item.numel for item in items)) or 1
    average = -(-sum(item.numel for item in items) // (piece * ranks)) * piece
    largest = max((item.grain for item in items), default=0)
    uncut = sorted((item.numel for item in items if item.grain == item.numel), reverse=True)
    # If there is one more than there are ranks, two of them are on one rank.
    pair = uncut[ranks - 1] + uncut[ranks] if len(uncut) > ranks else 0
    return max(average, largest, pair)


@final
@attrs.frozen
class _Grid:
    """Shards of known lengths, one after the other."""

    bounds: tuple[int, ...]
    """The end of each shard."""
    pace: int
    """Each shard is a multiple of this long."""

    def shard_numels(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in itertools.pairwise((0, *self.bounds)))

    def earliest(self, item: _Item, start: int, limit: int) -> int | None:
        """Return the first start in `[start, limit)` at which the item fits before `limit` and no boundary cuts it."""
        bounds, numel = self.bounds, item.numel
        start = -(-start // item.step) * item.step
        coarse = math.lcm(item.grain, item.step)
        at = bisect_right(bounds, start)
        while start + numel <= limit:
            bound = bounds[at]
            if start + numel <= bound:
                return start
            # The boundary is a multiple of the step, so all starts on this lattice are.
            start = bound - (bound - start) // coarse * coarse
            if start < bound and (
                self.pace % item.grain == 0 or (at + 1 < len(bounds) and start + numel <= bounds[at + 1])
            ):
                return start if start + numel <= limit else None
            start, at = bound, at + 1
        return None


@final
@attrs.frozen
class _Grids:
    """The grids that there are: each has a longest shard."""

    ranks: int
    step: int
    shares: tuple[Fraction, ...]

    def of(self, longest: int, pace: int) -> _Grid:
        """Return the grid whose longest shard has `longest` elements, a multiple of `pace`."""
        if not self.shares:
            return _Grid(tuple(range(longest, longest * self.ranks + 1, longest)), longest)
        most = max(self.shares)
        lengths = (math.ceil(longest * share / most / pace) * pace for share in self.shares)
        return _Grid(tuple(itertools.accumulate(lengths)), pace)

    def least(self, items: Sequence[_Item]) -> int:
        """Return a lower bound of the longest shard."""
        if not self.shares:
            return _fewest(items, self.ranks)
        return max(item.grain for item in items)

    def paces(self, items: Sequence[_Item]) -> Iterator[tuple[int, int]]:
        """Yield pairs of a pace and the least length for which it may be enough, the shortest length first.

        A parameter that is longer than two shards has two boundaries in it or more, so its grain divides the distance
        of these. The longest parameters may be such; the others need shards of half their length.
        """
        pace = math.lcm(self.step, *(item.step for item in items))
        least, lengths = self.least(items), sorted({i.numel for i in items if i.grain > 1}, reverse=True)
        found: dict[int, int] = {}
        for length in (*lengths, 0):
            enough = max(least, -(-length // 2))
            found[pace] = min(found.get(pace, enough), enough)
            pace = math.lcm(pace, *(item.grain for item in items if item.numel == length))
        rounded = [(pace, -(-enough // pace) * pace) for pace, enough in found.items()]
        yield from sorted(rounded, key=lambda each: (each[1], -each[0]))


@final
@attrs.frozen
class _Order:
    """The parameters in the order in which they are laid out."""

    items: Sequence[_Item]
    fills_gaps: bool
    """Whether a parameter may be put in a gap between two others; if not, each one lies behind those before it."""

    def lay_out(self, grid: _Grid) -> dict[int, int] | None:
        """Return the start of each item by its index; `None` if there is no room."""
        starts: dict[int, int] = {}
        free = [(0, grid.bounds[-1])]
        kind, at = None, 0
        for item in self.items:
            # Where one parameter did not fit, the next one of its kind does not either.
            at = at if item.kind == kind else 0
            found = _first_fit(grid, item, free, at)
            if found is None:
                return None
            kind, (at, start) = item.kind, found
            starts[item.index] = start
            before, after = (free[at][0], start), (start + item.numel, free[at][1])
            left = [before, after] if self.fills_gaps else [after]
            free[at : at + 1] = [part for part in left if part[0] < part[1]]
        return starts


def _first_fit(grid: _Grid, item: _Item, free: Sequence[tuple[int, int]], at: int) -> tuple[int, int] | None:
    """The first of the intervals `free`, from number `at` on, in which the item has a place: its number, the start."""
    for number in range(at, len(free)):
        begin, limit = free[number]
        if limit - begin >= item.numel:
            start = grid.earliest(item, begin, limit)
            if start is not None:
                return number, start
    return None


@final
@attrs.frozen
class _Found:
    """A grid that has room for all, and the start of each item by its index."""

    grid: _Grid
    starts: dict[int, int]

    @property
    def numel(self) -> int:
        return self.grid.bounds[-1]


def _shortest(items: Sequence[_Item], orders: Sequence[_Order], grids: _Grids) -> _Found:
    """Return the shortest flat parameter that the search finds; of equal ones, that of the first order."""
    best: _Found | None = None
    for pace, least in grids.paces(items):
        for order in orders:
            found = _bisect(order, grids, pace, least, None if best is None else best.numel)
            if found is not None and (best is None or found.numel < best.numel):
                best = found
    assert best is not None, "a shard that is long enough has room for all parameters"
    return best


def _bisect(order: _Order, grids: _Grids, pace: int, least: int, below: int | None) -> _Found | None:
    """Return the shortest flat parameter, of fewer elements than `below`, whose shards are multiples of `pace` long."""

    def attempt(length: int) -> _Found | None:
        grid = grids.of(length, pace)
        starts = order.lay_out(grid)
        return None if starts is None else _Found(grid, starts)

    short, length, more, found = least - pace, least, pace, None
    while found is None:
        if below is not None and grids.of(length, pace).bounds[-1] >= below:
            return None
        found = attempt(length)
        if found is None:
            short, length, more = length, length + more, more * 2
    while length - short > max(pace, length >> _FINE):
        middle = short + (length - short) // pace // 2 * pace
        closer = attempt(middle)
        if closer is None:
            short = middle
        else:
            length, found = middle, closer
    return found
