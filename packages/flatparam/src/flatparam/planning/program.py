"""A training program: a model, its inputs, its loss, and the steps that train it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor, nn

from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel
from flatparam.planning.hollow.blank import Blank
from flatparam.planning.inputs import Inputs, scalar_of, tokens_for
from flatparam.planning.setup import Setup, modules_named
from flatparam_comm import Topology

__all__ = ["TrainingProgram", "Trained", "Watcher", "train", "train_step"]


class Watcher(Protocol):
    """Is told what a training program is about to do."""

    def stage(self, name: str, step: int) -> AbstractContextManager[None]:
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


@final
@attrs.frozen(eq=False)
class TrainingProgram:
    """What is trained: how the model, its inputs and its loss are made. Nothing is made before `train`."""

    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], Inputs]
    loss: Callable[[Any], Tensor]
    template: nn.Module | None = None
    """The module that `build` copies, if it does."""
    copies: Callable[[nn.Module, dict[int, Any]], nn.Module] = copy.deepcopy
    """Copies the template, as `copy.deepcopy` does with a memo."""

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
        """The program that trains `model`.

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
            make: Callable[[nn.Module], Inputs] = functools.partial(
                tokens_for, batch=batch, sequence=sequence
            )
        elif callable(inputs) and not isinstance(inputs, Tensor):
            given = inputs
            make = lambda _: given(batch, sequence)  # noqa: E731
        else:
            ready = inputs
            make = lambda _: ready  # noqa: E731
        return cls(build, make, loss or scalar_of, model if isinstance(model, nn.Module) else None)

    def call(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """The loss of one micro-batch."""
        if isinstance(inputs, Tensor):
            output = model(inputs)
        elif isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs)
        return self.loss(output)


@contextlib.contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


def train(
    program: TrainingProgram, setup: Setup, topology: Topology, watcher: Watcher, *, steps: int
) -> Trained:
    """Build, wrap and train on the ranks of `topology`, for real or in hollow memory."""
    with watcher.stage("building", 0):
        with Blank():
            model = program.build()
        model.train()
        inputs = program.inputs(model)
        if setup.checkpointing:
            _checkpoint(model, setup.checkpointing)
    with watcher.stage("wrapping", 0):
        arguments = setup.arguments(topology, model)
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            arguments |= {"param_init_fn": _materialise, "device_id": torch.device("cpu")}
        wrapped = FullyShardedDataParallel(model, **arguments)
        del model, arguments
    trained = Trained(wrapped, setup.make_optimizer(wrapped), inputs)
    watcher.made(trained)
    for step in range(steps):
        train_step(program, setup, trained, watcher, step)
    return trained


def train_step(program: TrainingProgram, setup: Setup, trained: Trained, watcher: Watcher, step: int) -> None:
    """Run one step: the micro-batches, clipping, the optimizer."""
    model, optimizer = trained.model, trained.optimizer
    for micro in range(setup.accumulate):
        last = micro == setup.accumulate - 1
        with _nothing() if last or not setup.no_sync else model.no_sync():
            with watcher.stage("forward", step):
                loss = program.call(model, trained.inputs)
            with watcher.stage("backward", step):
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
    if setup.max_norm is not None:
        with watcher.stage("clipping", step):
            model.clip_grad_norm_(setup.max_norm)
    if optimizer is not None:
        with watcher.stage("optimizer", step):
            optimizer.step()
    with watcher.stage("zero_grad", step):
        model.zero_grad(set_to_none=True)


def _checkpoint(model: nn.Module, names: tuple[str, ...]) -> None:
    # A private module of torch, as the guide about activation checkpointing uses it.
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    chosen = modules_named(model, names)
    apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)


def _materialise(module: nn.Module) -> None:
    """Give a module's own tensors memory: parameters without values, and buffers, which may be indices, zeros."""
    module.to_empty(device="cpu", recurse=False)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()
