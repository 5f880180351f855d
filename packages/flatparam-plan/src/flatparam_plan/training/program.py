"""A training program: a model, its inputs and its loss; and its steps, for real or in hollow memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, final

import attrs
import torch
from torch import Tensor, nn

from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel
from flatparam_comm import Topology
from flatparam_plan.hollow.blank import Blank
from flatparam_plan.plan_error import PlanError
from flatparam_plan.training.setup import Setup, recompute, without_cache


@final
@attrs.frozen(eq=False)
class TrainingProgram:
    """A program that trains: how its model, its inputs and its loss are made. Nothing is made before `train`."""

    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], Inputs]
    loss: Callable[[Any], Tensor]
    template: nn.Module | None = None
    """The module that `build` copies, if it does."""
    copies: Callable[[nn.Module, dict[int, Any]], nn.Module] = copy.deepcopy
    """Copies the template, as `copy.deepcopy` does with a memo."""
    keeps_cache: bool = False
    """Whether a model of transformers keeps keys and values for later tokens, if its configuration says so."""
    notes: tuple[str, ...] = ()
    """The facts of the training that the model does not say itself, for the reader of a plan."""

    @classmethod
    def of(
        cls,
        model: nn.Module | Callable[[], nn.Module],
        inputs: Inputs | Callable[..., Inputs] | None = None,
        *,
        batch: int = 1,
        sequence: int = 128,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> TrainingProgram:
        """Return the program that trains `model`.

        Args:
            model: a module, on any device, which is copied and not changed; or a function that makes one.
            inputs: what the model is called with; a function of `(batch, sequence)` that makes it; or `None` for token
                ids `[batch, sequence]`, and labels if the model takes any.
            batch: the rows of a micro-batch on a rank.
            sequence: the tokens of a row.
            loss: makes a scalar of what the model returns; by default that is `output.loss`, `output["loss"]`, the
                output itself if it is a scalar, or the sum of the first tensor.
        """
        build = functools.partial(copy.deepcopy, model) if isinstance(model, nn.Module) else model
        if inputs is None:
            make: Callable[[nn.Module], Inputs] = functools.partial(tokens_for, batch=batch, sequence=sequence)
        elif callable(inputs) and not isinstance(inputs, Tensor):
            given = inputs
            make = lambda _: given(batch, sequence)  # noqa: E731
        else:
            ready = inputs
            make = lambda _: ready  # noqa: E731
        return cls(build, make, loss or scalar_of, model if isinstance(model, nn.Module) else None)

    def call(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the loss of one micro-batch."""
        if isinstance(inputs, Tensor):
            output = model(inputs)
        elif isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs)
        return self.loss(output)


# The inputs of a model, and the loss in its output


Inputs: TypeAlias = "tuple[Any, ...] | Mapping[str, Any] | Tensor"
"""The inputs of a model: one tensor, positional arguments, or named ones."""


def scalar_of(output: Any) -> Tensor:
    """Return the loss in what a model returns; see `TrainingProgram.of`."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        loss: Tensor = output["loss"]
        return loss
    if isinstance(getattr(output, "loss", None), Tensor):
        loss = output.loss
        return loss
    while isinstance(output, (tuple, list, Mapping)) and output:
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    if not isinstance(output, Tensor):
        raise PlanError(
            f"expected a model that returns a loss or a tensor, found {type(output).__name__}; have it return "
            "one, or pass flatparam.plan() a loss=, a function that makes a scalar of what the model returns"
        )
    return output if output.dim() == 0 else output.sum()


def tokens_for(model: nn.Module, *, batch: int, sequence: int) -> Inputs:
    """Token ids, all zero, and labels if the model takes any, under the names that its forward has for them.

    A model of transformers that has a decoder beside its encoder gets token ids for it, too, and one of pictures gets
    `[batch, channels, height, width]` pixels, as its configuration says.
    """
    names = [
        each.name
        for each in inspect.signature(model.forward).parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    if "input_ids" in names:
        named = {"input_ids": tokens}
        if "labels" in names:
            named["labels"] = torch.zeros(batch, sequence, dtype=torch.int64)
        elif "decoder_input_ids" in names:
            named["decoder_input_ids"] = torch.zeros(batch, sequence, dtype=torch.int64)
        return named
    config: Any = getattr(model, "config", None)
    if "pixel_values" in names and isinstance(getattr(config, "image_size", None), int):
        size = config.image_size
        return {"pixel_values": torch.zeros(batch, getattr(config, "num_channels", 3), size, size)}
    if len(names) > 1 and any(each in names[1] for each in ("target", "label")):
        return tokens, torch.zeros(batch, sequence, dtype=torch.int64)
    return (tokens,)


_FIT: Final = "plan it with inputs that fit the model (--inputs, or inputs=)"
_NO_CACHE: Final = (
    "planned without the cache of keys and values that the configuration asks for: set config.use_cache = False when "
    "you train, as transformers' Trainer does; inputs with use_cache=True, or --arg use_cache=True, plan it"
)


class Watcher(Protocol):
    """Is told what a training program is about to do."""

    def stage(self, name: str, step: int) -> contextlib.AbstractContextManager[None]:
        """Inside, the program is at this stage: building, wrapping, forward, backward, clipping, optimizer."""

    def made(self, trained: Trained) -> None:
        """The model is wrapped, and its optimizer is there."""


@final
@attrs.frozen(eq=False)
class Trained:
    """A wrapped model, its optimizer, and what it is called with."""

    model: FullyShardedDataParallel
    optimizer: torch.optim.Optimizer | None
    inputs: Inputs
    notes: tuple[str, ...] = ()
    """How the program is trained, other than the model says."""


def train(program: TrainingProgram, setup: Setup, topology: Topology, watcher: Watcher, *, steps: int) -> Trained:
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
