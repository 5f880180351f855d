"""Ranks that diverge: all ranks detect it together, and each of them raises the error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import attrs

from flatparam_comm import Collectives, FlatParamError, Topology, told_by_ranks
from flatparam_runtime.agreement.fingerprint import Deed, Fingerprint
from flatparam_runtime.unit.unit import Unit

STEP: Final = "step of "
"""How the description of an optimizer's step begins."""


class DivergenceError(FlatParamError):
    """The ranks are not running the same model or the same program; raised on every rank."""


def groups_of(units: Sequence[Unit], *, only_meshes: bool = False) -> dict[Collectives, list[Unit]]:
    """Return every group that `units` shard, replicate or are cut over, with the units that use it.

    Without those over which the ranks do different things with some unit, since they compare what they do with all.
    """
    meshes = {unit: each for unit in units for handle in unit.handles if (each := handle.forms.meshes) is not None}
    beside = {unit: each.ordered(unit.handles) for unit, each in meshes.items()}
    differ = {group for groups in beside.values() for group, is_alike in groups.items() if not is_alike}
    by_group: dict[Collectives, list[Unit]] = {}
    for unit in units:
        others = (group for group in beside.get(unit, ()) if group not in differ)
        for group in (*(() if only_meshes else unit.plan.topology.groups), *others):
            by_group.setdefault(group, []).append(unit)
    return by_group


def _told_by_all(units: Sequence[Unit], value: object, label: str) -> list[Any]:
    """Return what each rank tells that holds part of `units`, by data-parallel ranks; every one of them calls it."""
    everyone = units[0].topology.exchange(value, label=label)
    for group in groups_of(units, only_meshes=True):
        rows = Topology(group).exchange(everyone, label=label)
        everyone = [each for column in zip(*rows, strict=True) for each in column]
    return everyone


def agree_on_deed(topology: Topology, deed: Deed) -> None:
    """Check, before a unit over `topology` issues a collective, that every rank is about to issue the same one.

    Raises:
        DivergenceError: on every rank; it names the unit and parameters that each rank has reached.
    """
    everyone = topology.exchange(deed, label="order")
    if any(other != deed for other in everyone):
        raise DivergenceError(_different_deeds(everyone, topology.rank))


def _different_deeds(everyone: Sequence[Deed | None], rank: int) -> str:
    deeds = [
        (r, f"was at {'the end of its pass' if deed is None else f'the {deed}'}") for r, deed in enumerate(everyone)
    ]
    between = [str(deed) for deed in everyone if deed is not None and deed.kind == "step"]
    if any(each.startswith(STEP) for each in between):
        return told_by_ranks(
            f"rank {rank}: the ranks have stepped differently",
            deeds,
            "every rank must step the same optimizers, with the same hyper-parameters (a scaler that skips steps must "
            "do so on all ranks: use ShardedGradScaler)",
        )
    if between:
        return told_by_ranks(
            f"rank {rank}: the ranks have not done the same between passes",
            deeds,
            "every rank must clip, scale, average, load and drop gradients in the same places, with the same values",
        )
    return told_by_ranks(
        f"rank {rank}: the ranks run different units",
        deeds,
        "every rank must call the same units in the same order (guard data-dependent branches so that all ranks take "
        "the same one), and have a loss that depends on each of them (add 0 * output.sum() where it does not)",
    )


def check_training(units: Sequence[Unit]) -> None:
    """Raise DivergenceError, on every rank, if the ranks train different parameters, naming the first."""
    handles = [(unit, handle) for unit in units for handle in unit.handles]
    trained = [bytes(handle.trained) for _, handle in handles]
    everyone = _told_by_all(units, trained, "what is trained")
    for (unit, handle), rows in zip(handles, zip(*everyone, strict=True), strict=True):
        for fqn, flags in zip(handle.layout.fqns, zip(*rows, strict=True), strict=True):
            if len(set(flags)) > 1:
                about = f"parameter {fqn!r} of unit {unit.name!r}"
                raise DivergenceError(
                    told_by_ranks(
                        f"rank {unit.topology.rank}: {about} is not trained on all ranks",
                        [(r, "trains it" if on else "has frozen it") for r, on in enumerate(flags)],
                        "set requires_grad in the same way on every rank",
                    )
                )


@final
@attrs.frozen
class _Account:
    """The account that a rank gives of itself when the ranks diverge."""

    model: str
    value: int
    """The hash of what every rank notes."""
    deeds: Sequence[Deed]
    """Its deeds since the ranks last agreed."""
    lists_all: bool
    """Whether its optimizers list what they step also where the rank has no element of it, as far as is known."""


def _first_divergence(everyone: Sequence[_Account], rank: int) -> str:
    """Return the message about the first thing in which the ranks diverge."""
    if len({told.model for told in everyone}) > 1:
        return told_by_ranks(
            f"rank {rank}: the ranks run different models",
            [(r, f"runs {told.model}") for r, told in enumerate(everyone)],
            "every rank must call the same models in the same order: forward, backward, evaluation",
        )
    lists_all = all(told.lists_all for told in everyone)
    everyone_deeds = [[deed for deed in told.deeds if deed.everywhere or lists_all] for told in everyone]
    places = range(max(map(len, everyone_deeds)) + 1)
    for place in places:
        deeds = [deeds[place] if place < len(deeds) else None for deeds in everyone_deeds]
        if any(deed != deeds[0] for deed in deeds):
            return _different_deeds(deeds, rank)
    return f"rank {rank}: the ranks have run different units since the last step; restart from a checkpoint"


def note_between_passes(units: Iterable[Unit], what: str) -> None:
    """Note that this rank is about to do `what`, in words, to models of which `units` are; all ranks must do the same.

    The ranks compare at the end of the next pass of each model, before an optimizer can step.
    """
    for fingerprint in dict.fromkeys(unit.observers.fingerprint for unit in units):
        if fingerprint is not None:
            fingerprint.note_step(what)


def check_same_between_passes(units: Sequence[Unit], *, label: str) -> None:
    """Check that all ranks have done the same to the models of which `units` are; every rank calls it, between passes.

    Args:
        label: what the ranks are about to do together, for messages.

    Raises:
        DivergenceError: on every rank, if the ranks diverge.
    """
    known = [unit.observers.fingerprint for unit in units]
    if not units or units[0].topology.data_parallel_size == 1:
        return
    # A rank may have no tree yet, if a call that makes one has failed there.
    told = [b"" if each is None or not each.noted else each.flags() for each in known]
    everyone = units[0].topology.exchange(told, label=label)
    for place, row in enumerate(zip(*everyone, strict=False)):
        if len({*row}) > 1:
            members = [unit for unit, each in zip(units, known, strict=True) if each is known[place]]
            check_deeds(known[place] or Fingerprint(), members)
    for fingerprint in dict.fromkeys(known):
        if fingerprint is not None:
            fingerprint.agreed(fingerprint.noted)


def check_deeds(fingerprint: Fingerprint, units: Sequence[Unit]) -> None:
    """Tell the ranks, whose fingerprints differ, what each has done since they last agreed; every rank calls it.

    If they differ only in steps of what some ranks have nothing of, and the optimizers there do not list it, such steps
    are not compared from then on.

    Args:
        units: units of the model, with the first of the ranks that take part.

    Raises:
        DivergenceError: on every rank, if the ranks diverge.
    """
    by_number = {unit.observers.number: unit for unit in units}
    lists_all = fingerprint.compares_own_steps and _lists_all(fingerprint, units)
    told = _Account(fingerprint.model, fingerprint.value, fingerprint.deeds(by_number), lists_all)
    everyone = _told_by_all(units, told, "order")
    if len({each.value for each in everyone}) > 1 or all(each.lists_all for each in everyone):
        raise DivergenceError(_first_divergence(everyone, units[0].topology.rank))
    fingerprint.forget_own_steps()


def _lists_all(fingerprint: Fingerprint, units: Sequence[Unit]) -> bool:
    """Whether the optimizers that have stepped list every trained parameter of which this rank has no element."""
    for unit in units:
        for handle in unit.handles:
            for index, parameter in enumerate(handle.exposure.parameters()):
                is_elsewhere = parameter is handle.flat_param or handle.layout.slots[index].span
                is_left_out = (id(handle), index) not in fingerprint.listed
                if parameter.requires_grad and not parameter.numel() and is_elsewhere and is_left_out:
                    return False
    return True
