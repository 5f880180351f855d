"""The program of a rank: it trains in one setting, and writes down what a certificate compares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from flatparam_certify.case import Case
from flatparam_certify.engines import Engine
from flatparam_certify.meshes import MeshSizes
from flatparam_certify.settings import Setting
from flatparam_certify.trainer import Trainer

_REDUCTIONS: Final = ("all_reduce", "allreduce", "reduce_scatter")


@final
@attrs.frozen(eq=False)
class StepSeen:
    """What a rank saw in one step; tensors are whole, and in the dtype that the engine has them in.

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
    """What a rank saw in a run.

    Attributes:
        steps: each step.
        weights: the parameters after the last step.
        reductions: the reductions that ran inside `no_sync`, by the names that the profiler has for them.
    """

    steps: list[StepSeen]
    weights: dict[str, Tensor | None]
    reductions: list[str]


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
    engine: Engine,
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
    reductions: list[str] = []
    if setting.no_sync:
        if trainer.no_sync() is None:
            return Skipped("with no_sync: the engine has none")
        if sizes.shows_no_sync:
            _watch_no_sync(trainer, reductions)
    data_rank = sizes.data_rank(torch.distributed.get_rank())
    optimizer = trainer.optimizer(optimizer_of(setting.optimizer))
    steps = []
    for step in range(setting.steps):
        weights = _kept(trainer.weights())
        batches = [case.draw(seed, step, number, data_rank) for number in range(setting.micro_batches)]
        losses = trainer.accumulate(case.loss_of, batches, setting.no_sync)
        trainer.finish()
        seen = StepSeen(
            weights,
            [None if each is None else float(each.detach()) for each in losses],
            _kept(trainer.gradients()),
        )
        if setting.clips:
            norm = float(trainer.clip(max_norm))
            seen = attrs.evolve(seen, norm=norm, clipped=_kept(trainer.gradients()))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(seen)
    return RunSeen(steps, _kept(trainer.weights()), sorted(set(reductions)))


def _kept(tensors: Any) -> dict[str, Tensor | None]:
    """Return copies of tensors, which later steps leave as they are."""
    return {
        name: None if each is None else each.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, each in tensors.items()
    }


def _watch_no_sync(trainer: Trainer, found: list[str]) -> None:
    """Have `found` grow by the names of the reductions that run while the trainer is inside `no_sync`."""
    before = trainer.no_sync

    @contextmanager
    def watched() -> Iterator[None]:
        context = before()
        assert context is not None, "it was asked before"
        seen: Any = profile(activities=[ProfilerActivity.CPU])
        with _without_stderr():
            seen.__enter__()
        try:
            with context:
                yield
        finally:
            with _without_stderr():
                seen.__exit__(None, None, None)
        found.extend(event.name for event in seen.events() if any(each in event.name for each in _REDUCTIONS))

    def no_sync() -> AbstractContextManager[None]:
        return watched()

    trainer.no_sync = no_sync  # type: ignore[method-assign]  # of this one object


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Keep what torch's profiler writes when it starts and stops from the terminal."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
