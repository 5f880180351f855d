"""Ranks that diverge: all ranks detect it together, and each of them raises the error."""

from __future__ import annotations

from collections.abc import Sequence

from flatparam_comm import FlatParamError, Topology, told_by_ranks
from flatparam_runtime.agreement.deed import Deed
from flatparam_runtime.unit.unit import Unit

__all__ = [
    "DivergenceError",
    "agree_on_deed",
    "check_training",
    "first_divergence",
]


class DivergenceError(FlatParamError):
    """The ranks are not running the same model or the same program; raised on every rank."""


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
        (r, f"was at {'the end of its pass' if deed is None else f'the {deed}'}")
        for r, deed in enumerate(everyone)
    ]
    if any(deed is not None and deed.kind == "step" for deed in everyone):
        return told_by_ranks(
            f"rank {rank}: the ranks have stepped differently",
            deeds,
            "every rank must step the same optimizers, with the same hyper-parameters (a scaler that skips steps must "
            "do so on all ranks: use ShardedGradScaler)",
        )
    return told_by_ranks(
        f"rank {rank}: the ranks run different units",
        deeds,
        "every rank must call the same units in the same order (guard data-dependent branches so that all ranks take "
        "the same one)",
    )


def check_training(units: Sequence[Unit]) -> None:
    """Raise DivergenceError, on every rank, if the ranks train different parameters, naming the first."""
    handles = [(unit, handle) for unit in units for handle in unit.handles]
    trained = [bytes(handle.trained) for _, handle in handles]
    everyone = units[0].topology.exchange(trained, label="what is trained")
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


def first_divergence(everyone: Sequence[Sequence[Deed]], rank: int) -> str:
    """The message about the first collective in which the ranks diverge."""
    places = range(max(map(len, everyone)) + 1)
    for place in places:
        deeds = [deeds[place] if place < len(deeds) else None for deeds in everyone]
        if any(deed != deeds[0] for deed in deeds):
            return _different_deeds(deeds, rank)
    return f"rank {rank}: the ranks have run different units since the last step; restart from a checkpoint"
