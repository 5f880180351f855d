"""The ranks of a model: those that its units are sharded over, and copied over; and what they ask for together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
from torch import nn

from flatparam_runtime import (
    ExchangesValues,
    SingleCollectives,
    Topology,
    clean_fqn,
    resolve_topology,
    unit_of,
    units_in,
)

__all__ = ["CALL", "Difference", "differing", "ranks_of", "topology_of"]

CALL: Final = "call"
"""The name of the call itself, among its arguments."""
_MOST_TOLD: Final = 3
"""Values, or rows of ranks, in a message."""


def topology_of(model: nn.Module) -> Topology:
    """Return the ranks of `model`; this one alone if it is not sharded."""
    units = units_in(model)
    return units[0].topology if units else Topology(SingleCollectives())


def ranks_of(model: nn.Module | None) -> ExchangesValues:
    """Return the ranks that save and load `model` together; all ranks if it is not sharded.

    Raises:
        ValueError: if its units are over several groups, none of which has all ranks.
    """
    named = {} if model is None else {clean_fqn(name): unit_of(each) for name, each in model.named_modules()}
    topologies = {unit.topology: name for name, unit in named.items() if unit is not None}
    if not topologies:
        return resolve_topology().shard
    try:
        world = resolve_topology().shard
    except ValueError:
        # There is no default group.
        world = None
    if world is not None and any(each.data_parallel_size == world.size for each in topologies):
        return world
    (first, name), *others = topologies.items()
    if others:
        raise ValueError(
            f"expected a model whose units are over one group of ranks, or one of them over all ranks, found "
            f"{name!r} over {first.data_parallel_size} and {others[0][1]!r} over a different group of "
            f"{others[0][0].data_parallel_size}; pass ranks=, those that hold the model together"
        )
    return first.group if len(first.groups) < 2 else _AllOf(first)


@final
@attrs.frozen
class _AllOf:
    """All ranks of a topology that both shards and copies, replica by replica."""

    topology: Topology

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.topology.data_parallel_size

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Return the `value` of each rank, in their order; every one of them calls it."""
        return self.topology.exchange(value, label=label)

    def barrier(self, *, label: str = "") -> None:
        """Return when every rank has called it."""
        self.topology.exchange(None, label=label)


@final
@attrs.frozen
class Difference:
    """The first rank that asks for something else than rank 0, and what each rank asks for, in words."""

    rank: int
    words: str


def differing(asked: Sequence[Mapping[str, object]]) -> Difference | None:
    """Return how the ranks' arguments of one call differ, if they do.

    Args:
        asked: the arguments of each rank, by name; the first may be the name of the call, `CALL`.
    """
    words: list[str] = []
    other = 0
    for name, value in asked[0].items():
        found = [each.get(name) for each in asked]
        if any(each != value for each in found):
            words.append(f"{name} is {_told(found)}")
            other = other or next(rank for rank, each in enumerate(found) if each != value)
        if words and name == CALL:
            # The arguments of different calls have nothing to do with each other.
            break
    return Difference(other, f"the ranks ask for different things: {'; '.join(words)}") if words else None


def _told(values: Sequence[object]) -> str:
    """Return the value of each rank in words: `1 on ranks 0-7, 2 on rank 8`."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(repr(value), []).append(rank)
    said = [
        f"{text} on rank {ranks[0]}" if len(ranks) == 1 else f"{text} on ranks {_ranges(ranks)}"
        for text, ranks in by_value.items()
    ]
    more = len(said) - _MOST_TOLD
    return ", ".join(said[:_MOST_TOLD]) + (f", and {more} other values" if more > 0 else "")


def _ranges(ranks: Sequence[int]) -> str:
    """Increasing ranks: `0-2, 5`."""
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    texts = [str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows]
    more = len(texts) - _MOST_TOLD
    return ", ".join(texts[:_MOST_TOLD]) + (f" and {more} more" if more > 0 else "")
