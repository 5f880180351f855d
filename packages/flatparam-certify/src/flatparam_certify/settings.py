"""The settings that an engine is run in: accumulation, clipping, optimizer, precision. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, final

import attrs

from flatparam_certify.meshes import CertifyError, MeshSizes

STEPS: Final = 2
CLIPS: Final = 0.5
"""The norm to clip to is this part of the norm of the first step."""
PRECISIONS: Final = ("fp32", "bf16")
OPTIMIZERS: Final = ("sgd", "adamw")


@final
@attrs.frozen
class Setting:
    """How one run trains.

    Attributes:
        micro_batches: those of a step.
        no_sync: whether all but the last are inside the engine's `no_sync`.
        clips: whether gradients are clipped.
        precision: of computing, one of `PRECISIONS`.
        optimizer: one of `OPTIMIZERS`.
        steps: the number of steps.
    """

    micro_batches: int = 1
    no_sync: bool = False
    clips: bool = False
    precision: str = "fp32"
    optimizer: str = "sgd"
    steps: int = STEPS

    def __str__(self) -> str:
        """Return a description such as `3 micro-batches with no_sync, clipped, fp32, adamw`."""
        accumulated = f"{self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"
        if self.micro_batches > 1:
            accumulated += " with no_sync" if self.no_sync else " without no_sync"
        return ", ".join([accumulated, *(["clipped"] if self.clips else []), self.precision, self.optimizer])


def all_settings(
    precisions: Sequence[str] = PRECISIONS,
    optimizers: Sequence[str] = OPTIMIZERS,
    micro_batches: int = 3,
    steps: int = STEPS,
) -> list[Setting]:
    """Return every combination, the simplest first; without accumulation if `micro_batches` is 1."""
    accumulations = [(1, False)]
    if micro_batches > 1:
        accumulations += [(micro_batches, False), (micro_batches, True)]
    return [
        Setting(count, no_sync, clips, precision, optimizer, steps)
        for precision in precisions
        for clips in (False, True)
        for count, no_sync in accumulations
        for optimizer in optimizers
    ]


def few_settings(every: Sequence[Setting]) -> list[Setting]:
    """Return those for meshes with groups of one rank: in fp32, without and with accumulation and clipping."""
    found = [
        each
        for each in every
        if each.precision == every[0].precision
        and each.optimizer == every[-1].optimizer
        and each.clips == (each.micro_batches > 1)
    ]
    return found


def micro_batches_beside(numbers: Collection[int]) -> int:
    """Return a number of micro-batches, so that a factor of it differs from one of those `numbers` of ranks."""
    return next(each for each in (3, 5, 7, 11, 13) if all(number % each for number in numbers))


def settings_for(
    mesh: MeshSizes, precisions: Sequence[str], optimizers: Sequence[str], micro_batches: int | None, steps: int
) -> list[Setting]:
    """Return the settings of a mesh.

    Raises:
        CertifyError: for a precision or an optimizer that is unknown, or numbers below 1.
    """
    for what, given, known in (("precision", precisions, PRECISIONS), ("optimizer", optimizers, OPTIMIZERS)):
        for each in given:
            if each not in known:
                raise CertifyError(f"{what}: expected {' or '.join(known)}, found {each!r}; choose one of them")
    count = micro_batches_beside([mesh.ranks]) if micro_batches is None else micro_batches
    if count < 1 or steps < 1:
        raise CertifyError(
            f"expected at least 1 micro-batch and 1 step, found {count} and {steps}; give larger numbers"
        )
    return all_settings(precisions, optimizers, count, steps)


def number_of_settings(mesh: MeshSizes, settings: Sequence[Setting], groups_of_one: bool) -> int:
    """Return how many settings `certify` runs in all."""
    shrunk = len(list(mesh.shrunk())) if groups_of_one else 0
    return len(settings) + shrunk * len(few_settings(settings))
