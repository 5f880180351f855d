"""The state of an optimizer over sharded parameters, by parameter name, in any of the forms."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn
from typing_extensions import final

from flatparam_runtime import Collectives, FlatParamError
from flatparam_state.codec import gather, shard_of
from flatparam_state.forms.state_form import FormKind, StateForm
from flatparam_state.forms.tiling import is_sharded_tensor
from flatparam_state.optimizer.held import Held, Holding
from flatparam_state.optimizer.inventory import agree_on_holdings
from flatparam_state.places import Place, places_in

__all__ = ["COUNTERS", "PER_RANK", "complete_groups", "optimizer_state_dict"]

COUNTERS: Final = frozenset({"step", "eta", "mu", "mu_product"})
"""The 0-d states of torch's optimizers that are not shaped like the parameter."""

PER_RANK: Final = "flatparam.per_rank"
"""The one key of a state that is another on each rank and not shaped like the parameter: a list of what each rank that
holds a part of the parameter has, `{"interval": [start, stop], "value": ...}`."""


def optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    offload_to_cpu: bool = True,
    rank0_only: bool = False,
    form: StateForm | None = None,
    state_dict: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The state as `{"state": {fqn: {name: value}}, "param_groups": [...]}`; every rank calls it.

    A tensor that is shaped like its parameter's sharded form becomes full, or sharded like the parameter's shape, as
    the form says; full ones are gathered one flat parameter at a time. Of any other value there is one where all ranks
    have the same, else one for each rank (see `PER_RANK`). The groups list names in `"params"`. A tied parameter has
    the first of its names in the model.

    Args:
        offload_to_cpu: put tensors on the CPU.
        rank0_only: only rank 0 gets the state, other ranks an empty dict.
        form: instead of the two; see `StateForm`.
        state_dict: what `optimizer.state_dict()` gave, by number or by name; by default it is asked. If it has no
            groups, the result has none.

    Raises:
        FlatParamError: on every rank, if an optimizer holds a parameter that is not the model's, the state one that the
            optimizer does not hold, or if a rank's optimizer lacks a parameter or a state that another rank's has.
    """
    form = form or StateForm(offload_to_cpu=offload_to_cpu, rank0_only=rank0_only)
    raw = optimizer.state_dict() if state_dict is None else state_dict
    places = list(places_in(model))
    try:
        holding = Holding.of(model, optimizer)
        states, others = _by_parameter(raw["state"], holding)
    except FlatParamError as error:
        agree_on_holdings(places, (), error=error)
        raise
    held = agree_on_holdings(places, holding.by_group, states)
    found: dict[str, dict[str, Any]] = {}
    for place, fqn, name, value in _sharded_states(places, states, form):
        if form.keeps(place):
            found.setdefault(fqn, {})[name] = value
    for item, values in states.items():
        if item.place is None:
            found[item.fqns[0]] = {name: copy_value(value, form.device) for name, value in values.items()}
    if form.rank0_only and not _is_first(model):
        return {}
    names = dict.fromkeys([*(fqn for item in holding.items for fqn in item.fqns), *held])
    named: dict[str, Any] = {"state": {fqn: found[fqn] for fqn in names if fqn in found} | others}
    if "param_groups" in raw:
        groups = [_named(group, holding) for group in raw["param_groups"]]
        complete_groups(groups, held)
        named["param_groups"] = groups
    return named


def _by_parameter(
    state: Mapping[Any, Mapping[str, Any]], holding: Holding
) -> tuple[dict[Held, Mapping[str, Any]], dict[Any, Any]]:
    """The states of parameters, and what else there is."""
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
    return {item: state[key] for key, item in meant.items()}, others


def complete_groups(groups: Sequence[dict[str, Any]], held: Mapping[str, int]) -> None:
    """Add the names in `held` that no group has, since only other ranks hold elements of them, to their groups."""
    known = {name for group in groups for name in group["params"]}
    for fqn, number in held.items():
        if fqn not in known and number < len(groups):
            for key in {"params", "param_names"} & groups[number].keys():
                groups[number][key].append(fqn)


def _named(group: Mapping[str, Any], holding: Holding) -> dict[str, Any]:
    """The group with the names of parameters, also where the optimizer was made from named parameters."""
    meant = holding.resolve(group["params"])
    fqns = [fqn for key in group["params"] for fqn in meant[key].fqns]
    return {**group, **{key: list(fqns) for key in ("params", "param_names") if key in group}}


def copy_value(value: Any, device: torch.device | None) -> Any:
    """`value` with memory of its own, on `device` where one is given; a `ShardedTensor` as it is."""
    if is_sharded_tensor(value):  # of a parameter that no unit holds: only who made it knows its ranks
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: copy_value(each, device) for key, each in value.items()}
    return value


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values are the same; tensors by their elements, dtype and shape."""
    if a is b:
        return True
    if is_sharded_tensor(a) or is_sharded_tensor(
        b
    ):  # to compare their elements, ranks would have to communicate
        return False
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and torch.equal(a.cpu(), b.cpu())
        )
    return bool(a == b)


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
        """What the other ranks have to know."""
        cpu = torch.device("cpu")
        return (
            {index: _Part(part.dtype) for index, part in self.parts.items()}
            | {index: copy_value(value, cpu) for index, value in self.plain.items()}
            | dict.fromkeys(self.unlike, _Unlike())
        )


@final
@attrs.frozen
class _Part:
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
                if not (isinstance(value, torch.Tensor) and value.shape == item.parameter.shape):
                    local.unlike.update(item.indices)
                continue
            for index in item.indices:
                if not (isinstance(value, torch.Tensor) and value.shape == item.parameter.shape):
                    local.plain[index] = value
                elif item.is_flat:
                    local.parts[index] = value[layout.fragment(index, rank).in_shard.as_slice()]
                else:
                    local.parts[index] = value.reshape(-1)
    return found


def _sharded_states(
    places: Sequence[Place], states: Mapping[Held, Mapping[str, Any]], form: StateForm
) -> Iterator[tuple[Place, str, str, Any]]:
    # The ranks of a group agree first: a rank may hold no element of a parameter, and so no state of it.
    for group, batch in itertools.groupby(places, key=lambda place: place.unit.plan.topology.shard):
        agreement = _Agreement.reach(group, [(place, _local(place, states)) for place in batch])
        for number in range(len(agreement.locals)):
            yield from agreement.states(number, form)


@final
@attrs.frozen(eq=False)
class _Agreement:
    """What the ranks of a group have of the states of some flat parameters."""

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
                        seen.setdefault((number, name, index), set()).add(isinstance(value, _Part))
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
        """The states of one flat parameter: of each its place, the parameter, its name and its value."""
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
                if (number, name, index) not in self.mixed and isinstance(values[0][1], _Part):
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
        """One value where the ranks have the same; else that of each."""
        raw = [
            (rank, self.raw[rank][number, name, index] if isinstance(value, _Part) else value)
            for rank, value in found
        ]
        if all(is_equal(value, raw[0][1]) for _, value in raw):
            return mine.plain.get(index, raw[0][1])
        layout = place.handle.layout
        spans = {rank: layout.fragment(index, rank).in_param for rank, _ in raw}
        return {
            PER_RANK: [
                {"interval": [spans[rank].start, spans[rank].stop], "value": value} for rank, value in raw
            ]
        }


def _gathered(
    place: Place, mine: _Local, dtype: torch.dtype, indices: Sequence[int], form: StateForm
) -> Iterator[tuple[int, Any]]:
    """The tensors `indices` of one state name, in the form; every rank calls it."""
    parts = [mine.parts.get(index) if index in indices else None for index in range(len(place.fqns))]
    shard = shard_of(place, parts, place.handle.flat_param.detach()).to(dtype)
    if form.kind is FormKind.FULL:
        full: Sequence[Any] = gather(place, shard, device=form.device, keep=form.keeps(place))
    else:
        full = form.sharded(place, shard, place.handle.present)
    return ((index, full[index]) for index in indices if full)


def _is_first(model: nn.Module) -> bool:
    return all(place.unit.plan.topology.group.rank == 0 for place in itertools.islice(places_in(model), 1))
