"""The ranks of a model, over which its units are sharded and copied: do they ask for the same, and load the same?"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import attrs
import xxhash
from torch import Tensor, nn

from flatparam_runtime import (
    ExchangesValues,
    SingleCollectives,
    Threshold,
    Topology,
    clean_fqn,
    resolve_topology,
    unit_of,
    units_in,
)
from flatparam_state.forms.chunker import is_dtensor
from flatparam_state.forms.deferred import is_ordinary
from flatparam_state.forms.tiling import EveryRank
from flatparam_state.places import mesh_groups, mesh_handles

CALL: Final = "call"
"""The name of the call itself, among its arguments."""
_MOST_TOLD: Final = 3
"""Values, or rows of ranks, in a message."""


def topology_of(model: nn.Module) -> Topology:
    """Return the ranks of `model`; this one alone if it is not sharded."""
    units = units_in(model)
    return units[0].topology if units else Topology(SingleCollectives())


def all_of(model: nn.Module) -> Any:
    """Return the ranks that hold `model` together, on whatever mesh, with `exchange`, `rank` and `is_first`."""
    topology, handles = topology_of(model), mesh_handles(units_in(model))
    return handles[0].forms.meshes.all_ranks(topology, handles) if handles else topology


def told_by_first(model: nn.Module, values: Iterable[Any]) -> Any:
    """Return the ranks that a state of the first one is for: all that hold `model`; every one of them calls it.

    If `values` are `DTensor`s on some rank, each first rank of data parallelism has its own, for its own ranks.
    """
    everyone = all_of(model)
    if isinstance(everyone, Topology) or not any(
        everyone.exchange(any(map(is_dtensor, values)), label="kind of state")
    ):
        return everyone
    return topology_of(model)


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
    units = [unit for unit in named.values() if unit is not None]
    parts = {each: math.prod(group.size for group in mesh_groups(units, each.groups)) for each in topologies}
    if world is not None and any(each.data_parallel_size * n == world.size for each, n in parts.items()):
        return world
    if max(parts.values()) > 1:
        return all_of(model)  # type: ignore[arg-type, no-any-return]  # it has units
    (first, name), *others = topologies.items()
    if others:
        raise ValueError(
            f"expected a model whose units are over one group of ranks, or one of them over all ranks, found "
            f"{name!r} over {first.data_parallel_size} and {others[0][1]!r} over a different group of "
            f"{others[0][0].data_parallel_size}; pass ranks=, those that hold the model together"
        )
    return first.group if len(first.groups) < 2 else EveryRank(first)


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


# Checksums of full tensors that every rank is given: each keeps only its own part, so they have to be the same.

UNCOMPARED: Final = 0
"""Stands for the checksum of a value that ranks do not compare, such as a part of a sharded tensor."""
_ADVICE: Final = "load the same state on every rank"
_MOST_MISFITS: Final = 20
"""How many misfits a rank tells the others of."""
CHECKED_NUMEL: Final = Threshold(
    "state.checked_numel",
    2**16,
    "Ranks that load full tensors compare so many elements of each, evenly spread if it has more.",
)


def checksums(values: Mapping[str, Any]) -> dict[str, int]:
    """By name, a checksum of each tensor in `values`; `UNCOMPARED` of what is no ordinary tensor with values."""
    return {
        name: _checksum(value) if is_ordinary(value) and not value.is_meta else UNCOMPARED
        for name, value in values.items()
    }


def digest(found: Mapping[str, int]) -> int:
    """One number for all of these checksums, the same in every process."""
    number: int = xxhash.xxh3_64_intdigest(repr(sorted(found.items())).encode())
    return number


def _checksum(value: Tensor) -> int:
    step = math.ceil(value.numel() / CHECKED_NUMEL.value) or 1
    some = value.detach().resolve_conj().resolve_neg().reshape(-1)[::step].cpu().contiguous()
    found: int = xxhash.xxh3_64_intdigest(ctypes.string_at(some.data_ptr(), some.nbytes))
    return found


def refused_anywhere(topology: Topology, refused: list[str], loaded: Mapping[str, int] | None = None) -> list[str]:
    """The misfits of every rank, each with its rank, so that no rank changes anything if one of them has a misfit.

    Args:
        topology: the ranks; every one of them calls it, with its own list.
        refused: what does not fit on this rank; the others hear of the first few.
        loaded: checksums of what is to be the same on all ranks, by name.
    """
    loaded = loaded or {}
    told = topology.exchange((refused[:_MOST_MISFITS], digest(loaded)), label="what does not fit")
    misfits = [f"rank {rank}: {each}" for rank, (found, _) in enumerate(told) for each in found]
    if not misfits and len({each for _, each in told}) > 1:
        misfits = _named_differences(topology.exchange(loaded, label="what is loaded"))[:_MOST_MISFITS]
    return misfits


def _named_differences(everyone: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the names that some ranks lack, or that have different checksums, each with these ranks, in words."""
    found = []
    for name in dict.fromkeys(name for known in everyone for name in known):
        without = [rank for rank, known in enumerate(everyone) if name not in known]
        ranks = {r: known[name] for r, known in enumerate(everyone) if known.get(name, UNCOMPARED) != UNCOMPARED}
        others = [rank for rank, each in ranks.items() if each != next(iter(ranks.values()))]
        if without:
            found.append(
                f"parameter {name!r}: expected it on all ranks, and there is none on {_listed(without)}; {_ADVICE}"
            )
        elif others:
            found.append(
                f"parameter {name!r}: expected the same values on all ranks, found different ones on {_listed(others)} "
                f"than on rank {next(iter(ranks))}; {_ADVICE}"
            )
    return found


def _listed(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
