"""What ranks compare, so that no two of them train different programs in silence."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import attrs
import torch
from typing_extensions import final

from flatparam_comm import Collectives, FlatParamError, FlatParamHandle, ReduceOp
from flatparam_runtime.fingerprint import Deed, Fingerprint
from flatparam_runtime.unit import Unit

__all__ = [
    "DivergenceError",
    "agree_on_deed",
    "agree_on_gradients",
    "agree_on_inference",
    "agree_on_units",
    "groups_of",
]

T = TypeVar("T")


class DivergenceError(FlatParamError):
    """The ranks are not running the same model or the same program; raised on every rank."""


def groups_of(units: Iterable[Unit]) -> Iterator[tuple[Collectives, list[Unit]]]:
    """Every group of more than one rank that `units` shard or replicate over, with the units that use it."""
    by_group: dict[Collectives, list[Unit]] = {}
    for unit in units:
        topology = unit.plan.topology
        for group in (topology.shard, topology.replicate):
            if group is not None and group.size > 1:
                by_group.setdefault(group, []).append(unit)
    yield from by_group.items()


# Before the first pass: the same units?


@final
@attrs.frozen
class _Fact:
    """One thing that must be the same on every rank: about what, and its value."""

    about: str
    value: str


def _everyone(unit: Unit, value: T, label: str) -> list[T]:
    """The `value` of every data-parallel rank, in rank order, replica by replica."""
    known = [value]
    topology = unit.plan.topology
    for group in (topology.shard, topology.replicate):
        if group is not None and group.size > 1:
            known = [item for items in group.exchange(known, label=label) for item in items]
    return known


def _rank(unit: Unit) -> int:
    topology = unit.plan.topology
    return topology.shard.rank + topology.shard.size * (topology.replicate.rank if topology.replicate else 0)


def agree_on_units(units: Sequence[Unit]) -> None:
    """Check that every rank has the same units with the same parameters and plans; warn of other weights.

    Raises:
        DivergenceError: on every rank, naming the first difference and what each rank has.
    """
    facts = [fact for unit in units for fact in _facts(unit)]
    weights = _initial_weights(units)
    root = units[0]
    everyone = _everyone(root, (_digest(facts), _digest(weights)), "units")
    if len({digest for digest, _ in everyone}) > 1:
        raise DivergenceError(_first_difference(_everyone(root, facts, "units"), _rank(root)))
    if len({digest for _, digest in everyone}) > 1:
        _warn_of_weights(_everyone(root, weights, "initial weights"))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _initial_weights(units: Sequence[Unit]) -> dict[str, int]:
    """The checksums of the parameters that are as they were when they were sharded, by what a message calls them."""
    found = {}
    for unit in units:
        weights, unit.initial_weights = unit.initial_weights, None
        if weights is not None and unit.stamp() == unit.initial_stamp:
            for fqn, checksum in weights.checksums().items():
                found[f"parameter {fqn!r} of unit {unit.name!r}"] = checksum
    return found


def _warn_of_weights(everyone: Sequence[Mapping[str, int]]) -> None:
    about = next(
        name
        for name in dict.fromkeys(name for found in everyone for name in found)
        if len({found.get(name) for found in everyone}) > 1
    )
    first = everyone[0].get(about)
    others = [rank for rank, found in enumerate(everyone) if found.get(about) != first]
    warnings.warn(
        f"the ranks begin with different weights: {about} has other values on ranks {others} than on rank 0, so what "
        "is trained is a mixture; seed all ranks alike, load the same state on all, or pass sync_module_states=True",
        stacklevel=2,
    )


def _facts(unit: Unit) -> Iterator[_Fact]:
    plan = unit.plan
    who = f"unit {unit.name!r}"
    yield _Fact(who, f"{len(unit.handles)} flat parameters")
    yield _Fact(f"the sharding strategy of {who}", f"free after forward: {plan.free_after_forward}")
    yield _Fact(f"the groups of {who}", f"{plan.topology.shard.size} ranks share the parameters")
    yield _Fact(f"the mixed precision of {who}", str(plan.precision))
    yield _Fact(f"use_orig_params of {who}", str(plan.use_orig_params))
    for handle in unit.handles:
        for slot, trained in zip(handle.layout.slots, handle.exposure.requires_grad(), strict=True):
            spec = slot.spec
            how = "trained" if trained else "frozen"
            yield _Fact(f"parameter {spec.fqn!r} of {who}", f"shape {spec.shape}, {spec.dtype}, {how}")


def _first_difference(everyone: Sequence[Sequence[_Fact]], rank: int) -> str:
    place = next(
        i for i in range(max(map(len, everyone)) + 1) if len({_at(facts, i) for facts in everyone}) > 1
    )
    told = "; ".join(f"rank {r} has {_told(_at(facts, place))}" for r, facts in enumerate(everyone))
    return (
        f"rank {rank}: the ranks have different models: {told}; build, wrap and configure the model in the same way on "
        "every rank"
    )


def _at(facts: Sequence[_Fact], place: int) -> _Fact | None:
    return facts[place] if place < len(facts) else None


def _told(fact: _Fact | None) -> str:
    return "no more parameters" if fact is None else f"{fact.about}: {fact.value}"


# During the first pass: the same next collective?


def agree_on_deed(unit: Unit, deed: Deed) -> None:
    """Check, before a collective of `unit`, that every rank is about to do the same one.

    Raises:
        DivergenceError: on every rank, naming the units and parameters that each is at.
    """
    everyone = _everyone(unit, deed, "order")
    if any(other != deed for other in everyone):
        raise DivergenceError(_different_deeds(everyone, _rank(unit)))


def _different_deeds(everyone: Sequence[Deed | None], rank: int) -> str:
    told = "; ".join(
        f"rank {r} was at {'the end of its pass' if deed is None else f'the {deed}'}"
        for r, deed in enumerate(everyone)
    )
    return (
        f"rank {rank}: the ranks run different units: {told}; every rank must call the same units in the same order "
        "(guard data-dependent branches so that all ranks take the same one)"
    )


# At the end of a backward pass: the same collectives, and which gradients?


def agree_on_gradients(
    units: Sequence[Unit], given: Mapping[FlatParamHandle, bytes], fingerprint: Fingerprint
) -> dict[FlatParamHandle, bytes]:
    """For every flat parameter, which of its parameters got a gradient on any rank.

    One small all-reduce for each group of ranks, in which every rank takes part. It also compares what the ranks have
    done since the last time.

    Raises:
        DivergenceError: on every rank, where that differs.
    """
    taking_part = {handle for unit in units for handle in unit.trainable} | given.keys()
    known = {handle: given.get(handle, bytes(len(handle.layout.slots))) for handle in taking_part}
    _agree(units, known, fingerprint)
    return known


def agree_on_inference(units: Sequence[Unit], fingerprint: Fingerprint) -> None:
    """Compare what the ranks have done in a pass that no backward follows.

    Raises:
        DivergenceError: on every rank, where that differs.
    """
    _agree(units, {}, fingerprint)


def _agree(units: Sequence[Unit], known: dict[FlatParamHandle, bytes], fingerprint: Fingerprint) -> None:
    """Combine the flags in `known` over ranks, in place, and compare fingerprints on the way."""
    own = combined = fingerprint.flags()
    for group, members in groups_of(units):
        handles = [handle for unit in members for handle in unit.handles if handle in known]
        flags = b"".join([*(known[handle] for handle in handles), combined])
        device = next((handle.device for unit in members for handle in unit.handles), members[0].device)
        mask = torch.frombuffer(bytearray(flags), dtype=torch.uint8).to(device)
        group.all_reduce(mask, op=ReduceOp.MAX, label="parameters with a gradient").wait()
        found = bytes(mask.tolist())
        combined = found[-len(own) :]  # the next group learns what this one has seen
        start = 0
        for handle in handles:
            stop = start + len(handle.layout.slots)
            known[handle] = found[start:stop]
            start = stop
    if combined != own:
        _check_training(units)
        deeds = _everyone(units[0], fingerprint.deeds(units), "order")
        raise DivergenceError(_first_divergence(deeds, _rank(units[0])))
    fingerprint.agreed()


def _check_training(units: Sequence[Unit]) -> None:
    """Raise DivergenceError, on every rank, if the ranks train different parameters, naming the first."""
    handles = [(unit, handle) for unit in units for handle in unit.handles]
    everyone = _everyone(units[0], [bytes(handle.trained) for _, handle in handles], "what is trained")
    for (unit, handle), rows in zip(handles, zip(*everyone, strict=True), strict=True):
        for fqn, flags in zip(handle.layout.fqns, zip(*rows, strict=True), strict=True):
            if len(set(flags)) > 1:
                told = "; ".join(
                    f"rank {r} {'trains' if on else 'has frozen'} it" for r, on in enumerate(flags)
                )
                raise DivergenceError(
                    f"rank {_rank(units[0])}: parameter {fqn!r} of unit {unit.name!r} is not trained on all ranks: "
                    f"{told}; set requires_grad in the same way on every rank"
                )


def _first_divergence(everyone: Sequence[Sequence[Deed]], rank: int) -> str:
    places = range(max(map(len, everyone)) + 1)
    for place in places:
        deeds = [deeds[place] if place < len(deeds) else None for deeds in everyone]
        if any(deed != deeds[0] for deed in deeds):
            return _different_deeds(deeds, rank)
    return f"rank {rank}: the ranks have run different units since the last step; restart from a checkpoint"
