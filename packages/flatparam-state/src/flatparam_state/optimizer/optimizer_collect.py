"""The state of an optimizer over sharded parameters, by parameter name, in any of the forms."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch import nn

from flatparam_runtime import Collectives, FlatParamError
from flatparam_state.forms.chunker import is_dtensor
from flatparam_state.forms.state_form import FormKind, StateForm
from flatparam_state.optimizer.entry import PerRank, copy_value, is_equal, spread_out
from flatparam_state.optimizer.first_state import FirstState, first_states
from flatparam_state.optimizer.held import Held, Holding, complete_groups, of_parts, with_names
from flatparam_state.optimizer.inventory import agree_on_holdings, with_states
from flatparam_state.places import Place, check_names, gather, mesh_groups, places_in, shard_of


@of_parts
def optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    offload_to_cpu: bool = True,
    rank0_only: bool = False,
    form: StateForm | None = None,
    state_dict: Mapping[str, Any] | None = None,
    first_state: bool = False,
) -> dict[str, Any]:
    """Return the state as `{"state": {fqn: {name: value}}, "param_groups": [...]}`; every rank calls it.

    A tensor that is shaped like its parameter's sharded form becomes full, or sharded like the parameter's shape, as
    the form says; full ones are gathered one flat parameter at a time. Of any other value there is one if all ranks
    have the same, else one for each rank (see `PER_RANK`). The groups list names in `"params"`. A tied parameter has
    the first of its names in the model.

    Args:
        offload_to_cpu: put tensors on the CPU.
        rank0_only: only rank 0 gets the state, other ranks an empty dict.
        form: instead of the two; see `StateForm`.
        state_dict: what `optimizer.state_dict()` gave, by number or by name; by default it is asked. If it has no
            groups, the result has none.
        first_state: for each trained parameter that no rank's optimizer has a state of yet, the result has what its
            first step will start from, as a `FirstState`, so that programs can load into it, and find it. The
            optimizer is not changed. If it cannot make a state, there is none, with a warning if it has none at all.

    Raises:
        FlatParamError: on every rank, if an optimizer holds a parameter that is not the model's, the state one that the
            optimizer does not hold, or if a rank's optimizer lacks a parameter or a state that another rank's has.
    """
    form = form or StateForm(offload_to_cpu=offload_to_cpu, rank0_only=rank0_only)
    raw = optimizer.state_dict() if state_dict is None else state_dict
    places = list(places_in(model))
    check_names(places, form)
    try:
        holding = Holding.of(model, optimizer)
        states, others = _by_parameter(raw["state"], holding)
    except FlatParamError as error:
        agree_on_holdings(places, (), error=error)
        raise
    held = agree_on_holdings(places, holding.by_group, states)
    new: dict[Held, Mapping[str, Any]] = {}
    stepped: frozenset[str] | None = None
    if first_state and state_dict is None:
        made = _first_states(optimizer, holding, states)
        stepped = with_states(places, states, made is not None)
        if stepped is not None:
            # Of some states, only one rank has those of a whole parameter.
            new = {item: values for item, values in (made or {}).items() if stepped.isdisjoint(item.fqns)}
    found: dict[str, dict[str, Any]] = {}
    with_owners = any(item.part_states is not None for item in holding.items)
    for place, fqn, name, value in sharded_states(places, states | new, form, with_owners=with_owners):
        if form.keeps(place):
            is_stepped = stepped is None or fqn in stepped
            found.setdefault(fqn, {} if is_stepped else FirstState())[name] = value
    for item, values in (states | new).items():
        if item.place is None:
            copies = {name: copy_value(value, form.device) for name, value in values.items()}
            found[item.fqns[0]] = FirstState(copies) if item in new else copies
    if form.rank0_only and places and places[0].unit.topology.group.rank != 0:
        return {}
    # In one order on all ranks, also if their optimizers hold the parameters in different ones.
    names = dict.fromkeys([*holding.fqns, *held])
    named: dict[str, Any] = {"state": {fqn: found[fqn] for fqn in names if fqn in found} | others}
    if "param_groups" in raw:
        meant = holding.resolve(key for group in raw["param_groups"] for key in group["params"])
        groups = [with_names(each, [meant[key] for key in each["params"]]) for each in raw["param_groups"]]
        complete_groups(groups, held)
        named["param_groups"] = groups
    return named


def _by_parameter(
    state: Mapping[Any, Mapping[str, Any]], holding: Holding
) -> tuple[dict[Held, Mapping[str, Any]], dict[Any, Any]]:
    """Return the states of parameters, and what else there is."""
    meant = holding.resolve(state)
    others = {key: copy_value(value, None) for key, value in state.items() if key not in meant}
    for key in others:
        if not isinstance(key, str):
            raise FlatParamError(
                f"the optimizer's state has an entry for parameter {key!r}, of which it holds {len(holding.items)}; "
                "pass the state_dict() of this very optimizer"
            )
        warnings.warn(
            f"the optimizer's state has an entry {key!r}, which is no parameter of the model; it is passed on as it is",
            stacklevel=4,
        )
    return {item: spread_out(state[key]) for key, item in meant.items()}, others


def _first_states(
    optimizer: torch.optim.Optimizer, holding: Holding, states: Mapping[Held, Mapping[str, Any]]
) -> dict[Held, Mapping[str, Any]] | None:
    """The states that the first step of those without any will start from; `None` if the optimizer cannot say."""
    try:
        return {item: spread_out(values) for item, values in first_states(optimizer, holding, states).items()}
    except Exception as error:
        if not states:
            warnings.warn(
                f"{type(optimizer).__name__} has no state yet, and cannot make one before its first step ({error}): "
                "its saved state cannot be loaded, and the optimizer would start from zero; load a full state instead",
                stacklevel=4,
            )
        return None


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
    """Add what only other replicas, or ranks of other meshes, have of states that are not cut."""
    plain = [{name: local.plain for name, local in named.items()} for named in mine]
    for told in replicas.exchange(plain, label="optimizer state of owners"):
        for named, theirs in zip(mine, told, strict=True):
            for name, values in theirs.items():
                local = named.setdefault(name, _Local())
                for index, value in values.items():
                    if index not in local.parts:
                        local.plain.setdefault(index, value)


def sharded_states(
    places: Sequence[Place], states: Mapping[Held, Mapping[str, Any]], form: StateForm, *, with_owners: bool = False
) -> Iterator[tuple[Place, str, str, Any]]:
    """Yield the states of the parameters of `places`: of each its place, the parameter, its name and its value.

    Every rank calls it. The ranks of a group agree first: a rank may hold no element of a parameter, and so no state.

    Args:
        places: the flat parameters.
        states: what this rank has.
        form: of the values.
        with_owners: some states may be on one rank alone, of all that hold parts; see `Held.is_kept_once`.
    """
    for topology, batch in itertools.groupby(places, key=lambda place: place.unit.topology):
        found = [(place, _local(place, states)) for place in batch]
        beside = mesh_groups([place.unit for place, _ in found], topology.groups)
        for group in filter(None, (topology.replicate, *beside)) if with_owners else ():
            _bring_together(group, [local for _, local in found])
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
