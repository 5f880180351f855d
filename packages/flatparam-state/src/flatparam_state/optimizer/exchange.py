"""The states of sharded parameters, as the ranks of a group agree on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import torch

from flatparam_runtime import Collectives
from flatparam_state.forms.chunker import is_dtensor
from flatparam_state.forms.state_form import FormKind, StateForm
from flatparam_state.optimizer.entry import PerRank, copy_value, is_equal
from flatparam_state.optimizer.held import Held
from flatparam_state.places import Place, gather, shard_of

__all__ = ["sharded_states"]


@final
@attrs.define(eq=False)
class _Local:
    """One state name of one flat parameter on this rank, by parameter index: parts to gather, and plain values."""

    parts: dict[int, torch.Tensor] = attrs.field(factory=dict)
    plain: dict[int, Any] = attrs.field(factory=dict)
    unlike: set[int] = attrs.field(factory=set)
    """Parameters of which the rank has no element, and a state that is not shaped like nothing."""

    @property
    def facts(self) -> dict[int, Any]:
        """The facts that the other ranks have to know."""
        cpu = torch.device("cpu")
        return (
            {index: _PartMark(part.dtype) for index, part in self.parts.items()}
            | {index: copy_value(value, cpu) for index, value in self.plain.items()}
            | dict.fromkeys(self.unlike, _Unlike())
        )


@final
@attrs.frozen
class _PartMark:
    """In place of a part of a tensor: that there is one."""

    dtype: torch.dtype


@final
@attrs.frozen
class _Unlike:
    """In place of a value that may be stale, on a rank that never steps the parameter: it is not shaped like it."""


def _local(place: Place, states: Mapping[Held, Mapping[str, Any]]) -> dict[str, _Local]:
    layout, rank = place.handle.layout, place.handle.rank
    found: dict[str, _Local] = {}
    for item, values in states.items():
        if item.place is None or item.place.handle is not place.handle:
            continue
        for name, value in values.items():
            local = found.setdefault(name, _Local())
            if item.is_elsewhere:
                if not item.is_cut(name, value):
                    local.unlike.update(item.indices)
                continue
            for index in item.indices:
                if not item.is_cut(name, value):
                    local.plain[index] = value
                elif item.is_flat:
                    local.parts[index] = value[layout.fragment(index, rank).in_shard.as_slice()]
                else:
                    local.parts[index] = value.reshape(-1)
    return found


def _bring_together(replicas: Collectives, mine: Sequence[dict[str, _Local]]) -> None:
    """Add what only other replicas have of states that are not cut."""
    plain = [{name: local.plain for name, local in named.items()} for named in mine]
    for told in replicas.exchange(plain, label="optimizer state of owners"):
        for named, theirs in zip(mine, told, strict=True):
            for name, values in theirs.items():
                local = named.setdefault(name, _Local())
                for index, value in values.items():
                    if index not in local.parts:
                        local.plain.setdefault(index, value)


def sharded_states(
    places: Sequence[Place],
    states: Mapping[Held, Mapping[str, Any]],
    form: StateForm,
    *,
    with_owners: bool = False,
) -> Iterator[tuple[Place, str, str, Any]]:
    """Yield the states of the parameters of `places`: of each its place, the parameter, its name and its value.

    Every rank calls it. The ranks of a group agree first: a rank may hold no element of a parameter, and so no state.

    Args:
        places: the flat parameters.
        states: what this rank has.
        form: of the values.
        with_owners: some states may be on one rank alone, in one of the replicas; see `Held.is_kept_once`.
    """
    for topology, batch in itertools.groupby(places, key=lambda place: place.unit.topology):
        found = [(place, _local(place, states)) for place in batch]
        if with_owners and topology.replicate is not None:
            _bring_together(topology.replicate, [local for _, local in found])
        agreement = _Agreement.reach(topology.shard, found)
        for number in range(len(agreement.locals)):
            yield from agreement.states(number, form)


@final
@attrs.frozen(eq=False)
class _Agreement:
    """The states of some flat parameters, as far as each rank of a group has them."""

    locals: list[tuple[Place, dict[str, _Local]]]
    facts: list[list[dict[str, dict[int, Any]]]]
    """By rank, and by flat parameter."""
    mixed: set[tuple[int, str, int]]
    """The states that only some ranks have in the shape of their part."""
    raw: list[dict[tuple[int, str, int], Any]]
    """By rank: parts that are not gathered, since other ranks have something else there."""

    @classmethod
    def reach(cls, group: Collectives, locals_: list[tuple[Place, dict[str, _Local]]]) -> _Agreement:
        mine = [{name: item.facts for name, item in local.items()} for _, local in locals_]
        facts = group.exchange(mine, label="optimizer state")
        seen: dict[tuple[int, str, int], set[bool]] = {}
        for each in facts:
            for number, by_name in enumerate(each):
                for name, values in by_name.items():
                    for index, value in values.items():
                        seen.setdefault((number, name, index), set()).add(isinstance(value, _PartMark))
        mixed = {key for key, kinds in seen.items() if len(kinds) > 1}
        if not mixed:
            return cls(locals_, facts, mixed, [])
        parts = {
            (number, name, index): local.parts[index].cpu()
            for number, (_, named) in enumerate(locals_)
            for name, local in named.items()
            for index in local.parts
            if (number, name, index) in mixed
        }
        return cls(locals_, facts, mixed, group.exchange(parts, label="optimizer state"))

    def states(self, number: int, form: StateForm) -> Iterator[tuple[Place, str, str, Any]]:
        """Yield the states of one flat parameter: of each its place, the parameter, its name and its value."""
        place, local = self.locals[number]
        by_rank = [each[number] for each in self.facts]
        for name in dict.fromkeys(name for each in by_rank for name in each):
            mine = local.get(name, _Local())
            found: dict[int, list[tuple[int, Any]]] = {}
            for rank, each in enumerate(by_rank):
                for index, value in each.get(name, {}).items():
                    if not isinstance(value, _Unlike):
                        found.setdefault(index, []).append((rank, value))
            dtypes: dict[int, torch.dtype] = {}
            for index, values in sorted(found.items()):
                if (number, name, index) not in self.mixed and isinstance(values[0][1], _PartMark):
                    dtypes[index] = values[0][1].dtype
                else:
                    value = self._plain(place, mine, number, name, index, values)
                    yield place, place.fqns[index], name, copy_value(value, form.device)
            for dtype in dict.fromkeys(dtypes.values()):
                wanted = [index for index, each in dtypes.items() if each == dtype]
                tensors = _gathered(place, mine, dtype, wanted, form.at(place))
                yield from ((place, place.fqns[index], name, tensor) for index, tensor in tensors)

    def _plain(
        self, place: Place, mine: _Local, number: int, name: str, index: int, found: list[tuple[int, Any]]
    ) -> Any:
        """Return the value, if all ranks have the same; otherwise the entry of a `PerRank`."""
        raw = [
            (rank, self.raw[rank][number, name, index] if isinstance(value, _PartMark) else value)
            for rank, value in found
        ]
        if all(is_equal(value, raw[0][1]) for _, value in raw):
            return mine.plain.get(index, raw[0][1])
        layout = place.handle.layout
        spans = {rank: layout.fragment(index, rank).in_param for rank, _ in raw}
        return PerRank(tuple((spans[rank], value) for rank, value in raw)).to_entry()


def _as_shown(place: Place, index: int, full: torch.Tensor) -> torch.Tensor:
    """Return a state in the form of its parameter in modules, if that is a `DTensor`, as with tensor parallelism."""
    if not place.handle.has_presenter(index):
        return full
    shown = place.handle.present(index, full).detach()
    return shown if is_dtensor(shown) else full


def _gathered(
    place: Place, mine: _Local, dtype: torch.dtype, indices: Sequence[int], form: StateForm
) -> Iterator[tuple[int, Any]]:
    """Return the tensors `indices` of one state name, in the form; every rank calls it."""
    parts: list[Any] = [None] * len(place.fqns)
    for index in indices:
        parts[index] = mine.parts.get(index)
    shard = shard_of(place, parts, place.handle.flat_param.detach()).to(dtype)
    if form.kind is FormKind.FULL:
        full: Sequence[Any] = gather(place, shard, device=form.device, keep=form.keeps(place))
        full = [_as_shown(place, index, each) for index, each in enumerate(full)]
    else:
        full = form.sharded(place, shard, place.handle.present)
    return ((index, full[index]) for index in indices if full)
