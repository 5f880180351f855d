"""The position of each parameter in a flat parameter, and the part of it that each rank owns.

Everything here is a frozen fact about integers: no rank is running, no tensor exists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final, final

import attrs
import torch
from typing_extensions import Self

from flatparam_core.errors import LayoutError
from flatparam_core.geometry.spans import Span
from flatparam_core.geometry.specs import ParamSpec

__all__ = ["FlatLayout", "Fragment", "Slot", "plan_layouts"]

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
    """One flat parameter: its slots in order, and its even split over `world_size` ranks.

    All slots have one dtype. `numel` counts the elements of the unsharded flat parameter with all padding; it is
    `world_size` times `shard_numel`. Rank `r` owns `[r * shard_numel, (r + 1) * shard_numel)`.
    """

    slots: tuple[Slot, ...]
    world_size: int
    numel: int

    def __attrs_post_init__(self) -> None:
        if self.world_size < 1:
            raise LayoutError(f"a layout needs a world size of at least 1, found {self.world_size}")
        if not self.slots:
            raise LayoutError("a layout needs at least one parameter")
        self._check_slots()
        if self.numel % self.world_size:
            raise LayoutError(f"{self.numel} elements cannot be split evenly over {self.world_size} ranks")

    def _check_slots(self) -> None:
        end = 0
        names: set[str] = set()
        for slot in self.slots:
            if slot.span.start < end:
                raise LayoutError(
                    f"parameter {slot.spec.fqn!r} overlaps the one before it in the flat parameter"
                )
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
            raise LayoutError(
                f"the slots end at {end}, behind the {self.numel} elements of the flat parameter"
            )

    @classmethod
    def plan(cls, specs: Sequence[ParamSpec], *, world_size: int, alignment_nbytes: int = 0) -> Self:
        """Lay parameters of one dtype end to end in the order given.

        Args:
            specs: at least one parameter; all of one dtype.
            world_size: ranks that share the flat parameter, whose length is padded to a multiple of it.
            alignment_nbytes: each slot starts at a multiple of this many bytes; 0 packs without gaps.
        """
        step = 1
        if alignment_nbytes and specs:
            itemsize = specs[0].dtype.itemsize
            step = math.lcm(alignment_nbytes, itemsize) // itemsize
        slots: list[Slot] = []
        end = 0
        for spec in specs:
            start = -(-end // step) * step
            end = start + spec.numel
            slots.append(Slot(spec, Span(start, end)))
        numel = -(-end // world_size) * world_size if world_size > 0 else end
        return cls(tuple(slots), world_size, numel)

    def with_dtype(self, dtype: torch.dtype) -> Self:
        """The same intervals for parameters of a different dtype."""
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
        """Elements of one rank's shard, padding included; the same on every rank."""
        return self.numel // self.world_size

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
        """The part of the flat parameter that `rank` owns.

        Raises:
            LayoutError: if `rank` is not in `[0, world_size)`.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not one of the {self.world_size} ranks of the layout")
        return Span(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def fragment(self, index: int, rank: int) -> Fragment:
        """The part of parameter `index` that `rank` owns; its spans are empty if the rank owns nothing of it."""
        return self._fragment(index, self.shard_span(rank))

    def _fragment(self, index: int, shard: Span) -> Fragment:
        slot = self.slots[index].span
        common = slot.overlap(shard)
        if not common:
            return Fragment(index, _NOTHING, _NOTHING)
        return Fragment(index, common.relative_to(slot.start), common.relative_to(shard.start))

    def ranks_of(self, index: int) -> range:
        """The ranks that own elements of parameter `index`; none if the parameter is empty."""
        span = self.slots[index].span
        if not span:
            return range(0)
        return range(span.start // self.shard_numel, (span.stop - 1) // self.shard_numel + 1)

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """The fragments of every parameter on `rank`, in slot order, empty ones included."""
        # All ranks share this dict, if they are threads.
        known = self._fragments
        if rank not in known:
            shard = self.shard_span(rank)
            known[rank] = tuple(self._fragment(index, shard) for index in range(len(self.slots)))
        return known[rank]

    @cached_property
    def _fragments(self) -> dict[int, tuple[Fragment, ...]]:
        return {}


def plan_layouts(
    specs: Sequence[ParamSpec], *, world_size: int, alignment_nbytes: int = 0
) -> tuple[FlatLayout, ...]:
    """Plan as few flat parameters as the parameters of a unit need.

    One flat parameter holds one dtype, and either trainable or frozen parameters, so that frozen ones cost no
    gradient memory and no reduced bytes. Trainable layouts come first; within each the order of `specs` is kept. Equal
    parameters get the same layout objects, so that the repeated blocks of a model share them.
    """
    return _plan_layouts(tuple(specs), world_size, alignment_nbytes)


@functools.lru_cache(maxsize=256)
def _plan_layouts(
    specs: tuple[ParamSpec, ...], world_size: int, alignment_nbytes: int
) -> tuple[FlatLayout, ...]:
    groups: dict[tuple[bool, torch.dtype], list[ParamSpec]] = {}
    for spec in specs:
        groups.setdefault((not spec.requires_grad, spec.dtype), []).append(spec)
    # The sort is stable: dtypes stay in order of appearance.
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return tuple(
        FlatLayout.plan(group, world_size=world_size, alignment_nbytes=alignment_nbytes)
        for _, group in ordered
    )
