"""The position of each parameter in a flat parameter, and the part of it that each rank owns.

Everything here is a frozen fact about integers: no rank is running, no tensor exists, but the one that is passed to
`FlatLayout.shard_of`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Final, final

import attrs
import torch

from flatparam_core.errors import LayoutError
from flatparam_core.geometry.chunks import Chunks, chunk_numel
from flatparam_core.geometry.placing import check_shares, place
from flatparam_core.geometry.spans import Span
from flatparam_core.geometry.specs import CHUNK, ELEMENT, ParamSpec

_NOTHING: Final = Span(0, 0)


@final
@attrs.frozen
class Slot:
    """A parameter's interval `span` (in elements) in the unsharded flat parameter."""

    spec: ParamSpec
    span: Span

    def __attrs_post_init__(self) -> None:
        if self.span.numel != self.spec.numel:
            raise LayoutError(
                f"parameter {self.spec.fqn!r} has {self.spec.numel} elements and a slot of {self.span.numel}"
            )


@final
@attrs.frozen
class Fragment:
    """The part of one parameter that one rank owns.

    `in_param` counts elements of the parameter in its memory order; `in_shard` counts elements of the rank's
    shard. Both have the same length. `index` is the slot's place in the layout.
    """

    index: int
    in_param: Span
    in_shard: Span

    def __attrs_post_init__(self) -> None:
        if self.in_param.numel != self.in_shard.numel:
            raise LayoutError(f"fragment {self.index}: {self.in_param} and {self.in_shard} differ in length")


@final
# Without slots it has a dict, which the cached properties need.
@attrs.frozen(slots=False, cache_hash=True)
class FlatLayout:
    """One flat parameter: its slots in order, and its split over `world_size` ranks.

    All slots have one dtype. `numel` counts the elements of the unsharded flat parameter with all padding: the sum of
    `shard_numels`. The ranks' shards lie end to end in it, but if it `is_chunked`. No boundary between two ranks cuts
    what the rule of a parameter keeps together.
    """

    slots: tuple[Slot, ...]
    world_size: int
    numel: int
    uneven_numels: tuple[int, ...] = ()
    """The elements of each rank's shard, padding included, if they are not the same on every rank; else empty."""

    def __attrs_post_init__(self) -> None:
        if self.world_size < 1:
            raise LayoutError(f"a layout needs a world size of at least 1, found {self.world_size}")
        if not self.slots:
            raise LayoutError("a layout needs at least one parameter")
        self._check_slots()
        if self.uneven_numels:
            self._check_uneven()
        elif self.numel % self.world_size:
            raise LayoutError(f"{self.numel} elements cannot be split evenly over {self.world_size} ranks")
        if not self.is_chunked:
            self._check_rules()

    def _check_uneven(self) -> None:
        found = self.uneven_numels
        if len(found) != self.world_size or sum(found) != self.numel or min(found) < (self.numel > 0):
            raise LayoutError(
                f"expected the lengths of {self.world_size} shards, each at least 1, that add up to {self.numel}; "
                f"found {len(found)} that add up to {sum(found)}, the shortest {min(found)}"
            )
        if len({*found}) == 1:
            raise LayoutError(f"each shard has {found[0]} elements, so uneven_numels must be empty")

    def _check_rules(self) -> None:
        # Nothing cuts an element, which is the rule of most parameters.
        for slot in (slot for slot in self.slots if slot.spec.rule is not ELEMENT):
            grain, start = slot.spec.grain, slot.span.start
            cut = next((bound - start for bound in self._cuts(slot.span) if (bound - start) % grain), None)
            if cut is not None:
                raise LayoutError(
                    f"parameter {slot.spec.fqn!r}: its rule is {slot.spec.rule}, which keeps {grain} elements "
                    f"together, but a boundary between ranks cuts it at element {cut}"
                )

    def _cuts(self, span: Span) -> Sequence[int]:
        """Return the boundaries between ranks inside `span`."""
        bounds = self._bounds
        return bounds[bisect_right(bounds, span.start) : bisect_left(bounds, span.stop)]

    @cached_property
    def _bounds(self) -> Sequence[int]:
        """The first element of each shard, and the end of the last."""
        if self.uneven_numels:
            return (0, *itertools.accumulate(self.uneven_numels))
        return range(0, self.numel + 1, self.shard_numel) if self.numel else (0,) * (self.world_size + 1)

    def _check_slots(self) -> None:
        end = 0
        names: set[str] = set()
        for slot in self.slots:
            if slot.span.start < end:
                raise LayoutError(f"parameter {slot.spec.fqn!r} overlaps the one before it in the flat parameter")
            if slot.spec.dtype != self.slots[0].spec.dtype:
                raise LayoutError(
                    f"parameter {slot.spec.fqn!r} has dtype {slot.spec.dtype}, the flat parameter {self.dtype}"
                )
            for name in (slot.spec.fqn, *slot.spec.aliases):
                if name in names:
                    raise LayoutError(f"two parameters have the name {name!r}")
                names.add(name)
            end = slot.span.stop
        if end > self.numel:
            raise LayoutError(f"the slots end at {end}, behind the {self.numel} elements of the flat parameter")

    @classmethod
    def plan(
        cls,
        specs: Sequence[ParamSpec],
        *,
        world_size: int,
        alignment_nbytes: int = 0,
        shard_alignment_nbytes: int = 0,
        held_in: Sequence[torch.dtype] = (),
        shares: Sequence[float] = (),
    ) -> FlatLayout:
        """Lay parameters of one dtype end to end.

        They lie in the order given, unless a rule of theirs asks for more than `ELEMENT`: then in the order that is
        found to waste least. It depends on the arguments only, so every rank plans the same.

        Args:
            specs: at least one parameter; all of one dtype.
            world_size: ranks that share the flat parameter, whose length is padded so that their shards are equal.
            alignment_nbytes: each slot starts at a multiple of this many bytes; 0 packs without gaps.
            shard_alignment_nbytes: each rank's shard starts at a multiple of this many bytes; 0 pads for equal shards
                alone.
            held_in: the dtypes that floating-point parameters and their gradients are held in beside their own; in
                each of them the starts are multiples of so many bytes, too.
            shares: for each rank the weight of its part, a positive number; empty gives all the same. Equal weights
                do as well.

        Raises:
            LayoutError: if there is no parameter, the dtypes differ, a name occurs twice, or the shares do not fit.
        """
        check_shares(shares, world_size)
        if any(spec.rule == CHUNK for spec in specs):
            return cls._chunked(specs, world_size, alignment_nbytes, held_in, shares)
        step, pace = (
            _step(nbytes, specs[0].dtype, held_in) if nbytes and specs else 1
            for nbytes in (alignment_nbytes, shard_alignment_nbytes)
        )
        is_uneven = len({*shares}) > 1
        if world_size > 0 and (is_uneven or any(spec.rule != ELEMENT for spec in specs)):
            return cls._placed(specs, world_size, math.lcm(step, pace), shares if is_uneven else ())
        slots = _end_to_end(specs, step)
        # One rank's shard is all of it, and ends where the last parameter does.
        rounded = world_size * pace if world_size > 1 else 1
        return cls(slots, world_size, -(-_end(slots) // rounded) * rounded)

    @classmethod
    def _chunked(
        cls,
        specs: Sequence[ParamSpec],
        world_size: int,
        alignment_nbytes: int,
        held_in: Sequence[torch.dtype],
        shares: Sequence[float],
    ) -> FlatLayout:
        other = next((spec for spec in specs if spec.rule != CHUNK or not spec.is_row_major), None)
        if other is not None or len({*shares}) > 1:
            why = "the ranks have different shares" if other is None else f"{other.fqn!r} has rule {other.rule}"
            raise LayoutError(
                f"{specs[0].fqn!r}, ...: chunks are cut of all parameters of a unit, row-major, and for equal shares, "
                f"but {why}"
            )
        step = _step(alignment_nbytes, specs[0].dtype, held_in) if alignment_nbytes else 1
        slots, width = [], 0
        for spec in specs:
            start = -(-width // step) * step
            slots.append(Slot(spec, Span(start * world_size, start * world_size + spec.numel)))
            width = start + chunk_numel(spec, world_size)
        return cls(tuple(slots), world_size, -(-width // step) * step * world_size)

    @classmethod
    def _placed(cls, specs: Sequence[ParamSpec], world_size: int, step: int, shares: Sequence[float]) -> FlatLayout:
        placing = place(specs, world_size=world_size, step=step, shares=shares)
        slots = [Slot(spec, Span(start, start + spec.numel)) for spec, start in zip(specs, placing.starts, strict=True)]
        # The sort is stable: empty parameters keep their order.
        slots.sort(key=lambda slot: slot.span)
        lengths = placing.shard_numels
        return cls(tuple(slots), world_size, sum(lengths), lengths if len({*lengths}) > 1 else ())

    def repacked(self, alignment_nbytes: int) -> FlatLayout:
        """The same parameters in the same order, each at a multiple of so many bytes, and the shortest equal shards."""
        step = _step(alignment_nbytes, self.dtype, ()) if alignment_nbytes else 1
        slots = _end_to_end([slot.spec for slot in self.slots], step)
        return FlatLayout(slots, self.world_size, -(-_end(slots) // self.world_size) * self.world_size)

    def with_dtype(self, dtype: torch.dtype) -> FlatLayout:
        """Return the same intervals for parameters of a different dtype."""
        if dtype == self.dtype:
            return self
        slots = (Slot(attrs.evolve(slot.spec, dtype=dtype), slot.span) for slot in self.slots)
        return attrs.evolve(self, slots=tuple(slots))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every parameter in the layout."""
        return self.slots[0].spec.dtype

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included, if they are the same on every rank.

        Raises:
            LayoutError: if the ranks' shares differ; `shard_span(rank).numel` says how many a rank has.
        """
        if self.uneven_numels:
            raise LayoutError(
                f"the shards of {self.fqns[0]!r}, ... have different lengths, from {min(self.uneven_numels)} to "
                f"{max(self.uneven_numels)} elements: ask for that of one rank"
            )
        return self.numel // self.world_size

    @property
    def shard_numels(self) -> tuple[int, ...]:
        """Elements of each rank's shard, padding included."""
        return self.uneven_numels or (self.numel // self.world_size,) * self.world_size

    @property
    def is_plain(self) -> bool:
        """Whether no rule and no share of a rank has a say in where the parameters lie."""
        return not self.uneven_numels and all(slot.spec.rule == ELEMENT for slot in self.slots)

    @cached_property
    def is_chunked(self) -> bool:
        """Return whether each rank has a chunk of every parameter, so that its shard is no interval of the whole.

        Parameter `i` then begins at `world_size * o` in the flat parameter, and its chunk at `o` in every shard. What
        ranks exchange has their shards end to end: `chunks` makes it, and takes it apart.
        """
        return self.world_size > 1 and self.slots[0].spec.rule == CHUNK

    @cached_property
    def chunks(self) -> Chunks:
        """Return what makes the flat parameter of what ranks exchange, and the other way round, if it `is_chunked`."""
        starts = [slot.span.start // self.world_size for slot in self.slots]
        specs = [slot.spec for slot in self.slots]
        return Chunks.of(specs, starts, self.numel // self.world_size, self.world_size)

    def shard_of(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the shard of `rank`, 1-D, of `full`, a flat tensor: a view, or a copy if it `is_chunked`."""
        if self.is_chunked and self.numel:
            return self.chunks.shard(full, rank)
        return full[self.shard_span(rank).as_slice()]

    @cached_property
    def fqns(self) -> tuple[str, ...]:
        """The parameters' names in the order of the slots."""
        return tuple(slot.spec.fqn for slot in self.slots)

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """The padding: every element of `[0, numel)` that is in no slot, as maximal spans."""
        gaps: list[Span] = []
        end = 0
        # An empty slot within a gap does not split it.
        for slot in filter(lambda slot: slot.span, self.slots):
            if slot.span.start > end:
                gaps.append(Span(end, slot.span.start))
            end = slot.span.stop
        if end < self.numel:
            gaps.append(Span(end, self.numel))
        return tuple(gaps)

    def shard_span(self, rank: int) -> Span:
        """Return the part of the flat parameter that `rank` owns, or of the shards end to end if it `is_chunked`.

        Raises:
            LayoutError: if `rank` is not in `[0, world_size)`.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not one of the {self.world_size} ranks of the layout")
        return Span(self._bounds[rank], self._bounds[rank + 1])

    def fragment(self, index: int, rank: int) -> Fragment:
        """Return the part of parameter `index` that `rank` owns; its spans are empty if the rank owns nothing of it."""
        return self._fragment(index, self.shard_span(rank))

    def _fragment(self, index: int, shard: Span) -> Fragment:
        slot = self.slots[index].span
        if self.is_chunked:
            chunk, start = chunk_numel(self.slots[index].spec, self.world_size), slot.start // self.world_size
            own = Span(0, slot.numel).overlap(Span(0, chunk).shifted(shard.start // (shard.numel or 1) * chunk))
            return Fragment(index, own, Span(start, start + own.numel)) if own else Fragment(index, _NOTHING, _NOTHING)
        common = slot.overlap(shard)
        if not common:
            return Fragment(index, _NOTHING, _NOTHING)
        return Fragment(index, common.relative_to(slot.start), common.relative_to(shard.start))

    def ranks_of(self, index: int) -> range:
        """Return the ranks that own elements of parameter `index`; none if the parameter is empty."""
        if self.is_chunked:
            spec = self.slots[index].spec
            return range(-(-spec.numel // max(1, chunk_numel(spec, self.world_size))))
        return self.ranks_in(self.slots[index].span)

    def ranks_in(self, span: Span) -> range:
        """Return the ranks that own elements of `span` of the flat parameter; none if it is empty."""
        if not span:
            return range(0)
        return range(bisect_right(self._bounds, span.start) - 1, bisect_left(self._bounds, span.stop))

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """Return the fragments of every parameter on `rank`, in slot order, empty ones included."""
        # All ranks share this dict, if they are threads.
        known = self._fragments
        if rank not in known:
            shard = self.shard_span(rank)
            known[rank] = tuple(self._fragment(index, shard) for index in range(len(self.slots)))
        return known[rank]

    @cached_property
    def _fragments(self) -> dict[int, tuple[Fragment, ...]]:
        return {}


def _end_to_end(specs: Sequence[ParamSpec], step: int) -> tuple[Slot, ...]:
    """Return the slots of `specs` in order, each at the first multiple of `step` elements behind the one before."""
    slots: list[Slot] = []
    for spec in specs:
        start = -(-_end(slots) // step) * step
        slots.append(Slot(spec, Span(start, start + spec.numel)))
    return tuple(slots)


def _end(slots: Sequence[Slot]) -> int:
    return slots[-1].span.stop if slots else 0


def _step(alignment_nbytes: int, stored: torch.dtype, held_in: Sequence[torch.dtype]) -> int:
    """The fewest elements that are a multiple of `alignment_nbytes` bytes in each dtype that they are held in."""
    others = held_in if stored.is_floating_point else ()
    return math.lcm(*(math.lcm(alignment_nbytes, d.itemsize) // d.itemsize for d in (stored, *others)))


@final
@attrs.frozen
class FlatParamShardMetadata:
    """The parameters of which a shard holds any element, in order.

    `param_offsets` are half-open `[start, stop)` intervals in elements of each parameter, in its memory order.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[tuple[int, ...], ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


def shard_metadata(layout: FlatLayout, rank: int) -> FlatParamShardMetadata:
    """Describe the shard that `rank` holds of `layout`."""
    held = [fragment for fragment in layout.fragments(rank) if fragment.in_param]
    specs = [layout.slots[fragment.index].spec for fragment in held]
    return FlatParamShardMetadata(
        tuple(spec.fqn for spec in specs),
        tuple(spec.shape for spec in specs),
        tuple(spec.stride for spec in specs),
        tuple(spec.numel for spec in specs),
        tuple((fragment.in_param.start, fragment.in_param.stop) for fragment in held),
    )
