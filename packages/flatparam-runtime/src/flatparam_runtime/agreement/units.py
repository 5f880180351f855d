"""The comparison before the first pass: does every rank have the same units, and the same initial weights?"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from torch import nn

from flatparam_comm import FlatParameter, Topology, clean_fqn, owner_of, told_by_ranks, told_ranks, warn_caller
from flatparam_runtime.agreement.divergence import DivergenceError
from flatparam_runtime.unit.unit import Unit

_Fact: TypeAlias = "tuple[str, str]"
"""A property that must be the same on every rank: its subject, and its value."""

_TREES: Final = itertools.count(1)
"""The trees whose ranks have agreed, as this process counts them."""


def agree_on_units(units: Sequence[Unit]) -> None:
    """Check that every rank has the same units with the same parameters and plans; warn of different weights.

    From then on the fingerprint of the tree is that of no other tree of the same ranks.

    If ranks ignore different modules, their parameters may have different names, which is a warning.

    Raises:
        DivergenceError: on every rank; it names the first difference and what each rank has.
    """
    facts = [fact for unit in units for fact in _facts(unit)]
    weights = _initial_weights(units)
    for unit in units:
        unit.held.initial = None
    root = units[0].topology
    _check_copies(root)
    _warn_of_smaller_groups(units)
    found = _digest(weights) if weights else ""
    told = root.exchange((_digest(facts), found, units[0].held.number, next(_TREES)), label="units")
    is_renamed = len({digest for digest, *_ in told}) > 1
    if is_renamed:
        everyone = root.exchange((facts, units[0].held.left_whole), label="units")
        text = _first_difference([each for each, _ in everyone], root.rank)
        kinds = {tuple(value for _, value in each) for each, _ in everyone}
        if len(kinds) > 1 or len({ignored for _, ignored in everyone}) == 1:
            raise DivergenceError(text)
        warn_caller(f"{text}; nothing but names differs, since the ranks ignore different modules: then all is well")
    digests = {digest for _, digest, *_ in told}
    # Models that were sharded at different places in the program may still be the same: the weights say so, if they are
    # those that were sharded.
    numbers = [each for _, _, each, _ in told]
    if len({*numbers}) > 1 and (len(digests) > 1 or "" in digests):
        text = _different_models(numbers, units[0], root.rank)
        if "" not in digests:
            raise DivergenceError(text)
        warn_caller(f"{text}; if they are the same model, all is well")
    elif len(digests) > 1 and not is_renamed:
        _warn_of_weights(root.exchange(weights, label="initial weights"))
    fingerprint = units[0].observers.fingerprint
    if fingerprint is not None:
        number = told[0][3]
        kind = type(units[0].module).__name__
        fingerprint.identify(number, f"the {kind} that was called first as number {number} of all models")


def _warn_of_smaller_groups(units: Sequence[Unit]) -> None:
    """Say that gradients of a unit inside are divided by fewer ranks than those around it."""
    inner = min(units, key=lambda unit: unit.topology.data_parallel_size)
    few, size = (unit.topology.data_parallel_size for unit in (inner, units[0]))
    if few < size and inner.handles and inner.reducer.divide_factor is None:
        warn_caller(
            f"gradients of unit {inner.name!r} are divided by its {few} ranks, and those around it by {size}: if it "
            "holds experts, call flatparam_meshes.hold_experts(model); otherwise set_gradient_divide_factor()"
        )


def _different_models(numbers: Sequence[int], root: Unit, rank: int) -> str:
    kind = type(root.module).__name__
    return told_by_ranks(
        f"rank {rank}: the ranks call different models first",
        [(r, f"calls the {kind} that is unit {number + 1} of those it sharded") for r, number in enumerate(numbers)],
        "every rank must shard the same models in the same order, and call them in the same order",
    )


def _check_copies(topology: Topology) -> None:
    """Check that the ranks that are to hold copies of one shard have the same place in their shard groups."""
    if topology.replicate is None or len(topology.groups) < 2:
        return
    places = topology.replicate.exchange(topology.shard.rank, label="places in shard groups")
    if len({*places}) > 1:
        raise DivergenceError(
            told_by_ranks(
                f"rank {topology.rank}: the ranks of a replicate group hold different shards",
                [(rank, f"has shard {place}") for rank, place in enumerate(places)],
                "pass process_group=(shard group, replicate group), in which the replicate group has the ranks with "
                "the same place in their shard groups, or a DeviceMesh",
            )
        )


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _initial_weights(units: Sequence[Unit]) -> dict[str, int]:
    """The checksums of the parameters that have not changed since they were sharded, by their names in a message."""
    found = {}
    for unit in units:
        weights = unit.held.initial
        # Other ranks hold other experts.
        are_experts = any(getattr(handle.forms.meshes, "experts", None) for handle in unit.handles)
        if weights is not None and not are_experts and unit.stamp() == weights.stamp:
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
    warn_caller(
        f"the ranks begin with different weights: {about} has different values on ranks {told_ranks(others)} than on "
        "rank 0, so the trained weights are a mixture; seed all ranks alike, load the same state on all, or pass "
        "sync_module_states=True"
    )


def _facts(unit: Unit) -> Iterator[_Fact]:
    plan = unit.plan
    who = f"unit {unit.name!r}"
    yield (who, f"{len(unit.handles)} flat parameters")
    yield (f"the sharding strategy of {who}", f"free after forward: {plan.free_after_forward}")
    yield (f"the groups of {who}", f"{plan.topology.shard.size} ranks share the parameters")
    yield (f"the mixed precision of {who}", str(plan.precision))
    yield (f"use_orig_params of {who}", str(plan.use_orig_params))
    yield (f"nonfinite of {who}", plan.nonfinite)
    for handle in unit.handles:
        lengths = handle.layout.uneven_numels
        if lengths:
            yield (f"the shares of {who}", f"shards of {', '.join(map(str, lengths))} elements")
        for slot, trained in zip(handle.layout.slots, handle.exposure.requires_grad(), strict=True):
            spec = slot.spec
            how = "trained" if trained else "frozen"
            rule = "" if spec.rule.kind == "element" else f", kept together by {spec.rule}"
            yield (f"parameter {spec.fqn!r} of {who}", f"shape {spec.shape}, {spec.dtype}, {how}{rule}")


def _first_difference(everyone: Sequence[Sequence[_Fact]], rank: int) -> str:
    place = next(i for i in range(max(map(len, everyone)) + 1) if len({_at(facts, i) for facts in everyone}) > 1)
    return told_by_ranks(
        f"rank {rank}: the ranks have different models",
        [(r, f"has {_told(_at(facts, place))}") for r, facts in enumerate(everyone)],
        "build, wrap and configure the model in the same way on every rank",
    )


def _at(facts: Sequence[_Fact], place: int) -> _Fact | None:
    return facts[place] if place < len(facts) else None


def _told(fact: _Fact | None) -> str:
    return "no more parameters" if fact is None else ": ".join(fact)


def names_left_whole(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters below `module` that no unit holds."""
    return frozenset(name for name, _ in _left_whole(module))


def warn_of_newcomers(units: Sequence[Unit]) -> None:
    """Warn, once of each, of trained parameters that no unit holds and that came in after the module was sharded."""
    # A copy does not know; and a module may have been taken out of the model.
    known = [each for each in units if each.held.left_whole is not None and each.held.reference() is not None]
    for unit in known:
        before = unit.held.left_whole or ()
        names = [name for name, p in _left_whole(unit.module) if p.requires_grad and name not in before]
        if names:
            for each in known:
                each.held.left_whole = names_left_whole(each.module) | {*(each.held.left_whole or ())}
            several = f" .. {names[-1]!r} ({len(names)} parameters)" if len(names) > 1 else ""
            warn_caller(
                f"unit {unit.name!r}: no unit holds {names[0]!r}{several}, which came into the module after it "
                "was sharded: gradients are not averaged over the ranks there, so each rank trains different values; "
                "replace or add modules before the model is sharded, or shard the new module, too"
            )
            return


def _left_whole(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        if owner_of(parameter) is None and not isinstance(parameter, FlatParameter):
            yield clean_fqn(name), parameter
