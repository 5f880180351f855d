"""The steps of a training program, for real or in hollow memory, and its own errors."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol, final

import attrs
import torch
from torch import nn

from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel
from flatparam_comm import Topology
from flatparam_plan.hollow.blank import Blank
from flatparam_plan.plan_error import PlanError
from flatparam_plan.training.named_modules import recompute, without_cache
from flatparam_plan.training.program import Inputs, TrainingProgram
from flatparam_plan.training.setup import Setup

__all__ = ["Trained", "Watcher", "train", "train_step"]

_FIT: Final = "plan it with inputs that fit the model (--inputs, or inputs=)"
_NO_CACHE: Final = (
    "planned without the cache of keys and values that the configuration asks for: set config.use_cache = False when "
    "you train, as transformers' Trainer does; inputs with use_cache=True, or --arg use_cache=True, plan it"
)


class Watcher(Protocol):
    """Is told what a training program is about to do."""

    def stage(self, name: str, step: int) -> contextlib.AbstractContextManager[None]:
        """Inside, the program is at this stage: building, wrapping, forward, backward, clipping, optimizer."""
        ...

    def made(self, trained: Trained) -> None:
        """The model is wrapped, and its optimizer is there."""
        ...


@final
@attrs.frozen(eq=False)
class Trained:
    """A wrapped model, its optimizer, and what it is called with."""

    model: FullyShardedDataParallel
    optimizer: torch.optim.Optimizer | None
    inputs: Inputs
    notes: tuple[str, ...] = ()
    """How the program is trained, other than the model says."""


def train(
    program: TrainingProgram, setup: Setup, topology: Topology, watcher: Watcher, *, steps: int
) -> Trained:
    """Build, wrap and train on the ranks of `topology`, for real or in hollow memory."""
    with watcher.stage("building", 0):
        with Blank():
            model = program.build()
        model.train()
        with _runs("making its inputs"):
            inputs = program.inputs(model)
        notes = program.notes
        is_asked = program.keeps_cache or (isinstance(inputs, Mapping) and "use_cache" in inputs)
        if not is_asked and without_cache(model):
            notes += (_NO_CACHE,)
        if setup.checkpointing:
            recompute(model, setup.checkpointing)
    with watcher.stage("wrapping", 0), _runs("wrapping it"):
        arguments = setup.arguments(topology, model)
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            arguments |= {"param_init_fn": _materialise, "device_id": torch.device("cpu")}
        wrapped = FullyShardedDataParallel(model, **arguments)
        del model, arguments
    with _runs("making its optimizer"):
        trained = Trained(wrapped, setup.make_optimizer(wrapped), inputs, notes)
    watcher.made(trained)
    for step in range(steps):
        train_step(program, setup, trained, watcher, step)
    return trained


def train_step(program: TrainingProgram, setup: Setup, trained: Trained, watcher: Watcher, step: int) -> None:
    """Run one step: the micro-batches, clipping, the optimizer."""
    model, optimizer = trained.model, trained.optimizer
    for micro in range(setup.accumulate):
        last = micro == setup.accumulate - 1
        with contextlib.nullcontext() if last or not setup.no_sync else model.no_sync():
            with watcher.stage("forward", step), _runs("its forward pass", _FIT):
                loss = program.call(model, trained.inputs)
            with watcher.stage("backward", step), _runs("its backward pass"):
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
    if setup.max_norm is not None:
        with watcher.stage("clipping", step):
            model.clip_grad_norm_(setup.max_norm)
    if optimizer is not None:
        with watcher.stage("optimizer", step), _runs("its optimizer's step"):
            optimizer.step()
    with watcher.stage("zero_grad", step):
        model.zero_grad(set_to_none=True)


def _materialise(module: nn.Module) -> None:
    """Give a module's own tensors memory: parameters without values, and buffers, which may be indices, zeros."""
    module.to_empty(device="cpu", recurse=False)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


# Errors of the program that is planned: of its model, its inputs, its optimizer


_OURS: Final = (
    "flatparam",
    "flatparam_comm",
    "flatparam_core",
    "flatparam_plan",
    "flatparam_runtime",
    "flatparam_state",
)


@contextlib.contextmanager
def _runs(what: str, advice: str = "") -> Iterator[None]:
    """Inside, an exception is told as one of the program.

    Args:
        what: the part of the program that runs inside.
        advice: how to mend what most likely is wrong there.

    Raises:
        PlanError: instead of the exception, which is its cause.
    """
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        told = f"expected a program that runs, found that {what} raises {type(error).__name__}: {error}"
        raise PlanError("; ".join(filter(None, (told + _place_of(error), advice)))) from error


def _place_of(error: Exception) -> str:
    """Return the innermost line that is neither torch's nor ours, to read after the error's own text."""
    libraries = [Path(torch.__file__).parent]
    for name in _OURS:
        found = importlib.util.find_spec(name)
        libraries += [] if found is None or found.origin is None else [Path(found.origin).parent]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # What Python has made itself is in no file.
        if os.path.isabs(frame.filename) and not any(map(Path(frame.filename).is_relative_to, libraries)):
            return f" (line {frame.lineno} of {frame.filename}, in {frame.name})"
    return ""
