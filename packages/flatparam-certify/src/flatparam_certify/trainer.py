"""The answer of an engine: how to run, clip and read a model that it has made its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Loss: TypeAlias = Callable[[Any, Any], Tensor]
"""The loss of a case: of the model and a batch, a tensor of one element."""
Whole: TypeAlias = Mapping[str, Tensor | None]
"""Whole tensors by the names of the parameters in the model as it was built."""
_OF_WRAPPERS: Final = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Trainer:
    """How a model of an engine is trained. Derive a class, and override what is different in yours.

    An engine that returns a module alone is taken to be trained as this class does it: the module is called, `no_sync`
    is the module's (or its `set_requires_gradient_sync`), and gradients are those of its parameters. A step calls
    `accumulate`, `finish`, `clip` if the gradients are clipped, and the optimizer's `step` and `zero_grad`.
    """

    def __init__(self, module: nn.Module) -> None:
        """Train `module`, which the loss is called with."""
        self.module = module

    def forward(self, loss: Loss, batch: Any) -> Tensor:
        """Return the loss of this rank's batch."""
        return loss(self.module, batch)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients; the loss is already divided by the number of micro-batches."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch's

    def no_sync(self) -> AbstractContextManager[Any] | None:
        """Return a context in which gradients add up without being reduced; None if the engine has no such thing."""
        module: Any = self.module
        if callable(getattr(module, "no_sync", None)):
            context: AbstractContextManager[Any] = module.no_sync()
            return context
        return _without_sync(module) if hasattr(module, "set_requires_gradient_sync") else None

    def accumulate(self, loss: Loss, batches: Sequence[Any], no_sync: bool) -> list[Tensor | None]:
        """Compute the gradients of the mean over some micro-batches; returns the loss of each.

        Pipelines override this. A rank that does not know a loss returns None in its place.

        Args:
            no_sync: whether all micro-batches but the last are inside `no_sync`.
        """
        losses: list[Tensor | None] = []
        for number, batch in enumerate(batches):
            context = self.no_sync() if no_sync and number + 1 < len(batches) else None
            with nullcontext() if context is None else context:
                found = self.forward(loss, batch)
                losses.append(found.detach())
                self.backward(found / len(batches))
        return losses

    def finish(self) -> None:
        """Reduce the gradients, if backward passes have not done so: called once a step, after the last of them."""

    def clip(self, max_norm: float) -> Tensor | float:
        """Clip the gradients to a norm, and return the norm that they had."""
        module: Any = self.module
        if callable(getattr(module, "clip_grad_norm_", None)):
            return whole(module.clip_grad_norm_(max_norm))
        return whole(nn.utils.clip_grad_norm_(self.module.parameters(), max_norm))

    def optimizer(self, make: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Return what `make` makes of the parameters that this rank updates."""
        return make(self.module.parameters())

    def weights(self) -> Whole:
        """Return the parameters of this rank, whole; every rank calls it."""
        return {name: whole(each.detach()) for name, each in named_parameters(self.module)}

    def gradients(self) -> Whole:
        """Return the gradients of this rank's parameters, whole; every rank calls it. None: the parameter has none."""
        return {name: None if each.grad is None else whole(each.grad) for name, each in named_parameters(self.module)}


def why_not_clipped(trainer: Trainer) -> str:
    """Return why torch's function cannot clip what nobody has said how to clip; empty, if it can."""
    if type(trainer).clip is not Trainer.clip or hasattr(trainer.module, "clip_grad_norm_"):
        return ""
    meshes = {getattr(each, "device_mesh", None) for _, each in named_parameters(trainer.module)}
    if len(meshes) < 2:
        return ""
    what = "DTensors beside plain tensors" if None in meshes else "DTensors of several meshes"
    return f"with clipping: torch's clip_grad_norm_ takes no {what}; override Trainer.clip"


class SummoningTrainer(Trainer):
    """A trainer for FSDP1's kind of module, whose parameters are shown whole inside a context."""

    def __init__(
        self,
        module: nn.Module,
        summon: Callable[..., AbstractContextManager[None]],
        clip: Callable[[nn.Module, float], Tensor] | None = None,
    ) -> None:
        """Train `module`, whose parameters `summon(module, writeback=False, with_grads=...)` shows."""
        super().__init__(module)
        self.summon = summon
        self.clip_by = clip

    def clip(self, max_norm: float) -> Tensor | float:
        """Clip the gradients as the engine does."""
        return super().clip(max_norm) if self.clip_by is None else self.clip_by(self.module, max_norm)

    def weights(self) -> Whole:
        """Return every parameter, whole."""
        with self.summon(self.module, writeback=False):
            return {name: whole(each.detach()).clone() for name, each in named_parameters(self.module)}

    def gradients(self) -> Whole:
        """Return every gradient, whole."""
        with self.summon(self.module, writeback=False, with_grads=True):
            return {
                name: None if each.grad is None else whole(each.grad).clone()
                for name, each in named_parameters(self.module)
            }


class AutocastTrainer(Trainer):
    """A trainer of a plain module, or of DDP, that computes in a lower precision by torch's autocast."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Compute `module` in `dtype`, where autocast does so."""
        super().__init__(module)
        self.dtype = dtype

    def forward(self, loss: Loss, batch: Any) -> Tensor:
        """Return the loss of this rank's batch, computed under autocast."""
        with torch.autocast("cpu", self.dtype):
            return loss(self.module, batch)


@contextmanager
def _without_sync(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def whole(tensor: Any) -> Tensor:
    """Return a tensor of this rank as a whole, plain one: of a DTensor, every rank calls it."""
    if callable(getattr(tensor, "full_tensor", None)):
        tensor = tensor.full_tensor()
    return torch.as_tensor(tensor).detach()


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters with the names that they have in the model without wrappers."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    for name, parameter in inner.named_parameters():
        for part in _OF_WRAPPERS:
            name = name.replace(part, "")
        yield name, parameter


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its floating-point tensors in `dtype`: those in mappings, tuples and lists, too."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {name: cast(each, dtype) for name, each in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [cast(each, dtype) for each in batch]
        # A named tuple takes its fields one by one.
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
