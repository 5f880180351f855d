"""The layouts that the parameters of a unit need, and the moves from one layout to a different one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import attrs
import torch

from flatparam_core.errors import LayoutError
from flatparam_core.geometry.layout import FlatLayout
from flatparam_core.geometry.spans import Span
from flatparam_core.geometry.specs import ParamSpec


def plan_layouts(
    specs: Sequence[ParamSpec],
    *,
    world_size: int,
    alignment_nbytes: int = 0,
    shard_alignment_nbytes: int = 0,
    held_in: Sequence[torch.dtype] = (),
    shares: Sequence[float] = (),
) -> tuple[FlatLayout, ...]:
    """Plan as few flat parameters as the parameters of a unit need.

    One flat parameter holds one dtype, and either trainable or frozen parameters, so that frozen ones cost no
    gradient memory and no reduced bytes. Trainable layouts come first; within each the order is that of
    `FlatLayout.plan`. Equal parameters get the same layout objects, so that the repeated blocks of a model share them.

    Args:
        specs: the parameters, with the rule of each.
        world_size: see `FlatLayout.plan`.
        alignment_nbytes: see `FlatLayout.plan`.
        shard_alignment_nbytes: see `FlatLayout.plan`.
        held_in: see `FlatLayout.plan`.
        shares: see `FlatLayout.plan`.
    """
    return _plan_layouts(
        tuple(specs), world_size, (alignment_nbytes, shard_alignment_nbytes), tuple(held_in), tuple(shares)
    )


@functools.lru_cache(maxsize=256)
def _plan_layouts(
    specs: tuple[ParamSpec, ...],
    world_size: int,
    alignments: tuple[int, int],
    held_in: tuple[torch.dtype, ...],
    shares: tuple[float, ...],
) -> tuple[FlatLayout, ...]:
    groups: dict[tuple[bool, torch.dtype], list[ParamSpec]] = {}
    for spec in specs:
        groups.setdefault((not spec.requires_grad, spec.dtype), []).append(spec)
    # The sort is stable: dtypes stay in order of appearance.
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return tuple(
        FlatLayout.plan(
            group,
            world_size=world_size,
            alignment_nbytes=alignments[0],
            shard_alignment_nbytes=alignments[1],
            held_in=held_in,
            shares=shares,
        )
        for _, group in ordered
    )


@final
@attrs.frozen
class Location:
    """Elements `span` of the shard that `rank` holds of flat parameter `layout` (an index in the list of layouts)."""

    layout: int
    rank: int
    span: Span


Place = Location
"""The older name of `Location`."""


@final
@attrs.frozen
class Move:
    """The same elements of one parameter (`in_param`, in its memory order) in two sets of layouts."""

    fqn: str
    in_param: Span
    source: Location
    target: Location


def replan(sources: Iterable[FlatLayout], targets: Iterable[FlatLayout]) -> Iterator[Move]:
    """Yield the copies that turn the shards of `sources` into the shards of `targets`.

    Loading at a different world size, under a different wrapping, or from an old checkpoint needs only this function.
    Every element of every target parameter is moved exactly once. The layouts may differ in world size, order,
    grouping, alignment and dtype.

    Raises:
        LayoutError: if a target parameter is missing in the sources or has a different shape or memory order there.
    """
    sources = tuple(sources)
    homes = {
        name: (number, index)
        for number, layout in enumerate(sources)
        for index, slot in enumerate(layout.slots)
        for name in (slot.spec.fqn, *slot.spec.aliases)
    }
    matched = []
    for number, target in enumerate(targets):
        for index, slot in enumerate(target.slots):
            spec = slot.spec
            if spec.fqn not in homes:
                raise LayoutError(f"parameter {spec.fqn!r} is not in the source layouts")
            home, home_index = homes[spec.fqn]
            found = sources[home].slots[home_index].spec
            if (found.shape, found.memory_order) != (spec.shape, spec.memory_order):
                raise LayoutError(
                    f"parameter {spec.fqn!r}: expected shape {spec.shape} with strides {spec.stride}, "
                    f"found {found.shape} with {found.stride}"
                )
            matched.append((home, home_index, number, target, index))
    # All refusals are above, at the call; the iterator refuses nothing.
    return _moves(sources, matched)


def _moves(sources: Sequence[FlatLayout], matched: Iterable[tuple[int, int, int, FlatLayout, int]]) -> Iterator[Move]:
    for home, home_index, number, target, index in matched:
        fqn = target.slots[index].spec.fqn
        pairs = itertools.product(_owners(sources[home], home_index), _owners(target, index))
        for (rank, owned, at), (to_rank, needed, to) in pairs:
            piece = owned.overlap(needed)
            if piece:
                source = Location(home, rank, piece.relative_to(owned.start).shifted(at.start))
                place = piece.relative_to(needed.start).shifted(to.start)
                yield Move(fqn, piece, source, Location(number, to_rank, place))


def _owners(layout: FlatLayout, index: int) -> Iterator[tuple[int, Span, Span]]:
    """Yield each rank that owns part of a parameter, with the spans of that part in the parameter and in the shard."""
    for rank in layout.ranks_of(index):
        fragment = layout.fragment(index, rank)
        yield rank, fragment.in_param, fragment.in_shard
