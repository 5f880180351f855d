"""The inventories of all ranks' optimizers, compared so that no rank's part of a state goes missing in silence."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import attrs
from typing_extensions import Self

from flatparam_runtime import FlatParamError, Topology
from flatparam_state.optimizer.held import Held
from flatparam_state.places import Place

_LABEL: Final = "what optimizers hold"
_OTHER, _SHAPED = 1, 2
"""Of one state of one parameter: one that is not shaped like the parameter, or one that is; zero if there is none."""
_NON_ZERO: Final = bytes([0] + [1] * 255)
_ONLY_SHAPED: Final = bytes(int(kind == _SHAPED) for kind in range(256))


@final
@attrs.frozen
class Inventory:
    """The parameters that one rank's optimizer holds, of some flat parameters: one byte for each, in order."""

    model: bytes
    """A digest of the parameters' names: only ranks of one model are compared."""
    owned: bytes
    """Non-zero if the rank has elements of the parameter."""
    held: bytes
    """The number of the group in which the optimizer holds the parameter, from 1; zero if it does not."""
    states: Mapping[str, bytes]
    """For each state name, what the rank has of it (0: nothing, 1: a value, 2: a tensor shaped like the parameter)."""

    @classmethod
    def of(
        cls,
        places: Sequence[Place],
        groups: Iterable[Sequence[Held]],
        states: Mapping[Held, Mapping[Any, Any]] | None = None,
    ) -> Self:
        """The inventory of `groups` and their `states`, of the parameters of `places`; `states` may be left out."""
        starts: dict[int, int] = {}
        names: list[str] = []
        owned = bytearray()
        for place in places:
            starts[id(place.handle)] = len(names)
            names.extend(place.fqns)
            owned += bytes(bool(f.in_shard) for f in place.handle.layout.fragments(place.handle.rank))
        held = bytearray(len(names))
        found: dict[str, bytearray] = {}
        for number, item in ((number, item) for number, group in enumerate(groups, 1) for item in group):
            start = None if item.place is None else starts.get(id(item.place.handle))
            if start is None:
                continue
            for index in item.indices:
                held[start + index] = min(number, 255)
            for name, value in (states or {}).get(item, {}).items():
                kind = _SHAPED if item.is_cut(name, value) and value.dim() > 0 else _OTHER
                row = found.setdefault(str(name), bytearray(len(names)))
                for index in item.indices:
                    row[start + index] = kind
        digest = hashlib.sha256("\0".join(names).encode()).digest()
        return cls(digest, bytes(owned), bytes(held), {name: bytes(row) for name, row in found.items()})


@final
@attrs.frozen
class Hole:
    """Something that the optimizer of one rank lacks."""

    rank: int
    fqn: str
    what: str
    hint: str

    @property
    def message(self) -> str:
        """The whole text but the hint."""
        return (
            f"the optimizer of rank {self.rank} {self.what}, unlike that of a different rank: the part of rank "
            f"{self.rank} would be missing from the optimizer's state"
        )

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}"


def first_hole(ranks: Mapping[int, Inventory], fqns: Sequence[str]) -> Hole | None:
    """The first thing that some rank lacks of the parameters `fqns`, which all inventories are about; `None`: nothing.

    A rank that has no element of a parameter need not hold it, nor have a state of it. A state that no rank has in the
    shape of the parameter may be one rank's own, as optimizers of 8 bits have it, if the others have any state.
    """
    held = {rank: _flags(each.held) for rank, each in ranks.items()}
    anywhere = _union(held.values())
    for rank, each in ranks.items():
        missing = _flags(each.owned) & anywhere & ~held[rank]
        if missing:
            fqn = _first(missing, fqns)
            hint = "give the optimizers of all ranks the same parameters"
            return Hole(rank, fqn, f"does not hold {fqn!r}", hint)
    names = dict.fromkeys(name for each in ranks.values() for name in each.states)
    with_any = {rank: _union(map(_flags, each.states.values())) for rank, each in ranks.items()}
    for name in names:
        rows = {rank: each.states.get(name, b"") for rank, each in ranks.items()}
        present = {rank: _flags(row) for rank, row in rows.items()}
        shaped = _union(_flags(row.translate(_ONLY_SHAPED)) for row in rows.values())
        for rank, each in ranks.items():
            needed = shaped | (_union(present.values()) & ~with_any[rank])
            missing = _flags(each.owned) & needed & ~present[rank]
            if missing:
                fqn = _first(missing, fqns)
                hint = "have the optimizers of all ranks step the same parameters"
                return Hole(rank, fqn, f"has no state {name!r} of {fqn!r}", hint)
    return None


def _flags(row: bytes) -> int:
    """Return a number with one byte for each of `row`: 1 for one that is not zero."""
    return int.from_bytes(row.translate(_NON_ZERO), "little")


def _union(flags: Iterable[int]) -> int:
    return functools.reduce(operator.or_, flags, 0)


def _first(flags: int, fqns: Sequence[str]) -> str:
    number = ((flags & -flags).bit_length() - 1) // 8
    return fqns[number] if number < len(fqns) else f"parameter {number}"


def group_numbers(ranks: Iterable[Inventory], fqns: Sequence[str]) -> dict[str, int]:
    """Of the parameters `fqns`, those that the optimizer of some rank holds, and in which of its groups."""
    held = [max(numbers) for numbers in zip(*(each.held for each in ranks), strict=True)]
    return {fqn: number - 1 for fqn, number in zip(fqns, held, strict=True) if number}


@final
@attrs.frozen
class _Answer:
    """The inventory of one rank, or why the rank cannot go on."""

    inventory: Inventory | None
    refusal: str


def agree_on_holdings(
    places: Sequence[Place],
    groups: Sequence[Sequence[Held]],
    states: Mapping[Held, Mapping[Any, Any]] | None = None,
    *,
    error: FlatParamError | None = None,
) -> dict[str, int]:
    """Compare what all ranks' optimizers hold of `places`; every rank calls it.

    Args:
        states: what is to be saved; without it only the parameters are compared.
        error: what keeps this rank from going on.

    Returns:
        The parameters that the optimizer of some rank holds, and in which of its groups.

    Raises:
        FlatParamError: on every rank, if one has an `error` or lacks what another has, with rank and parameter.
    """
    held: dict[str, int] = {}
    for topology, batch in _by_topology(places):
        mine = Inventory.of(batch, groups, states) if error is None else None
        answers = topology.exchange(_Answer(mine, "" if error is None else str(error)), label=_LABEL)
        for rank, answer in enumerate(answers):
            if answer.inventory is None:
                raise FlatParamError(
                    answer.refusal if error is not None else f"rank {rank}: {answer.refusal}"
                ) from error
        ranks = [answer.inventory for answer in answers if answer.inventory is not None]
        for rank, told in enumerate(ranks):
            if told.model != ranks[0].model:
                raise FlatParamError(
                    f"the units of rank {rank} have different parameters than those of rank 0: build and wrap "
                    "the model in the same way on every rank"
                )
        fqns = [fqn for place in batch for fqn in place.fqns]
        hole = first_hole(dict(enumerate(ranks)), fqns)
        if hole is not None:
            raise FlatParamError(str(hole))
        held |= group_numbers(ranks, fqns)
    # A model without units has no ranks to tell.
    if error is not None:
        raise error
    return held


def with_states(places: Sequence[Place], states: Iterable[Held], is_able: bool) -> frozenset[str] | None:
    """Return the parameters of `places` of which the optimizer of some rank has a state; every rank calls it.

    Args:
        states: those of which this rank's has one.
        is_able: whether this rank can go on.

    Returns:
        Their names, the same on every rank; None if some rank is not able to go on.
    """
    found: set[str] = set()
    everywhere = is_able
    for topology, batch in _by_topology(places):
        fqns = [fqn for place in batch for fqn in place.fqns]
        here = {id(place.handle) for place in batch}
        mine = {fqn for item in states if item.place is not None and id(item.place.handle) in here for fqn in item.fqns}
        told = topology.exchange((is_able, bytes(fqn in mine for fqn in fqns)), label=_LABEL)
        everywhere = everywhere and all(able for able, _ in told)
        found |= {fqn for fqn, *flags in zip(fqns, *(row for _, row in told), strict=True) if any(flags)}
    return frozenset(found) if everywhere else None


def _by_topology(places: Sequence[Place]) -> Iterator[tuple[Topology, list[Place]]]:
    found: dict[Topology, list[Place]] = {}
    for place in places:
        found.setdefault(place.unit.topology, []).append(place)
    yield from found.items()
