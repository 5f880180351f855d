"""The program of a rank: it trains in one setting, and writes down what a certificate compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flatparam_certify.case import Case
from flatparam_certify.engines import EngineUnderTest
from flatparam_certify.meshes import MeshSizes
from flatparam_certify.settings import Setting
from flatparam_certify.trainer import Trainer, why_not_clipped


@final
@attrs.frozen(eq=False)
class StepSeen:
    """The record of a rank of one step; tensors are whole, and in the dtype that the engine has them in.

    Attributes:
        weights: the parameters before the step.
        losses: the loss of each micro-batch, or None where the rank does not know it.
        gradients: those before clipping; None: the parameter has none.
        norm: the norm that clipping returned.
        clipped: the gradients after clipping.
    """

    weights: dict[str, Tensor | None]
    losses: list[float | None]
    gradients: dict[str, Tensor | None]
    norm: float | None = None
    clipped: dict[str, Tensor | None] | None = None


@final
@attrs.frozen(eq=False)
class RunSeen:
    """The record of a rank of a run.

    Attributes:
        steps: each step.
        weights: the parameters after the last step.
        collectives: how many a micro-batch of the last step called inside `no_sync`, and how many the last one outside.
    """

    steps: list[StepSeen]
    weights: dict[str, Tensor | None]
    collectives: tuple[int, int] | None = None


@final
@attrs.frozen
class Skipped:
    """Why a rank did not run a setting."""

    why: str


def optimizer_of(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """Return what makes the optimizer of a setting of parameters; it is the same one on ranks and in the reference."""
    if name == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def run_setting(
    case: Case,
    engine: EngineUnderTest,
    sizes: MeshSizes,
    mesh: DeviceMesh,
    setting: Setting,
    seed: int,
    max_norm: float,
) -> RunSeen | Skipped:
    """Train a new model for a few steps, as this rank; every rank calls it.

    Args:
        max_norm: what gradients are clipped to, if the setting clips.
    """
    if not engine.takes(setting.precision):
        return Skipped(f"in {setting.precision}: the engine takes no argument `dtype`")
    trainer = engine.trainer(case.model(seed), mesh, setting.precision)
    if setting.clips and (why := why_not_clipped(trainer)):
        return Skipped(why)
    watch: _NoSyncWatch | None = None
    collectives = None
    if setting.no_sync:
        if trainer.no_sync() is None:
            return Skipped("with no_sync: the engine has none")
        if sizes.shows_no_sync:
            watch = _NoSyncWatch(trainer)
            watch.begin()
    data_rank = sizes.data_rank(torch.distributed.get_rank())
    optimizer = trainer.optimizer(optimizer_of(setting.optimizer))
    steps = []
    for step in range(setting.steps):
        weights = _kept(trainer.weights())
        batches = [case.draw(seed, step, number, data_rank) for number in range(setting.micro_batches)]
        losses = trainer.accumulate(case.loss_of, batches, setting.no_sync)
        trainer.finish()
        collectives = None if watch is None else watch.end_of_step()
        seen = StepSeen(
            weights, [None if each is None else float(each.detach()) for each in losses], _kept(trainer.gradients())
        )
        if setting.clips:
            norm = float(trainer.clip(max_norm))
            seen = attrs.evolve(seen, norm=norm, clipped=_kept(trainer.gradients()))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(seen)
    return RunSeen(steps, _kept(trainer.weights()), collectives)


def _kept(tensors: Any) -> dict[str, Tensor | None]:
    """Return copies of tensors, which later steps leave as they are."""
    return {
        name: None if each is None else each.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, each in tensors.items()
    }


@attrs.define(eq=False)
class _NoSyncWatch:
    """Counts the collectives of a step: inside each context of `no_sync`, and after the last of them."""

    trainer: Trainer
    inside: list[int] = attrs.field(factory=list)
    left_at: int | None = None

    def begin(self) -> None:
        """Have the trainer's `no_sync` count from now on."""
        before = self.trainer.no_sync

        @contextmanager
        def watched() -> Iterator[None]:
            context = before()
            assert context is not None, "it was asked before"
            entered = _collectives()
            with context:
                yield
            self.left_at = _collectives()
            self.inside.append(self.left_at - entered)

        def no_sync() -> AbstractContextManager[None]:
            return watched()

        self.trainer.no_sync = no_sync  # type: ignore[method-assign]  # of this one object

    def end_of_step(self) -> tuple[int, int] | None:
        """Return the fewest collectives inside, and those after; None if the engine did not enter `no_sync`.

        The first micro-batch of a step may gather what stays, and is not counted if there is another one.
        """
        found = None
        if self.left_at is not None:
            found = (min(self.inside[1:] or self.inside), _collectives() - self.left_at)
        self.inside, self.left_at = [], None
        return found


def _collectives() -> int:
    """Return the number of collectives that this process has called so far, in all groups."""
    groups: Any = torch.distributed.distributed_c10d._world.pg_names
    return sum(group._get_sequence_number_for_group() for group in groups)
