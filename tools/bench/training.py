"""A contender at work: a model, its optimizer, and the three parts of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from attrs import define, frozen
from torch import Tensor, nn

from flatparam_comm import ByteLedger, Collectives

from .widened import widen
from .workloads import Batch, Workload

CPU: Final = torch.device("cpu")


def optimizer_over(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of every contender."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@frozen
class Setting:
    """What every contender is given.

    `ledger` is for transports that are not of c10d; None where nobody counts. `process_group` is what `group`
    works over, as torch's own libraries take it; None for torch's default group.
    """

    workload: Workload
    bf16: bool
    group: Collectives
    ledger: ByteLedger | None = None
    device: torch.device = CPU
    process_group: Any = None

    def model(self) -> nn.Module:
        """The workload's model on the device, with the same weights in every call, in fp32."""
        there: AbstractContextManager[object] = nullcontext() if self.device == CPU else self.device
        with there:
            model = self.workload.seeded()
        if self.bf16 and self.device == CPU:
            widen(model)
        return model

    def batch(self, *, cast: bool = False) -> Batch:
        """This rank's batch; `cast` for who computes in bf16 and does not cast by itself."""
        batch = [t.to(self.device) for t in self.workload.batch_of(self.group.rank)]
        return tuple(t.bfloat16() if cast and t.is_floating_point() else t for t in batch)


@define(eq=False)
class Training:
    """One contender on one rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch

    def forward(self) -> Tensor:
        """The loss."""
        loss: Tensor = self.model(*self.batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Gradients."""
        torch.autograd.backward(loss)

    def update(self) -> None:
        """The optimizer's step, after which there are no gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> float:
        """All three; the loss."""
        loss = self.forward()
        self.backward(loss)
        self.update()
        return loss.item()


def unsharded(model: nn.Module, setting: Setting) -> Training:
    """Train `model`, whole on this rank, with the full optimizer; in bf16 a copy of the weights computes."""
    if not setting.bf16:
        return Training(model, optimizer_over(list(model.parameters())), setting.batch())
    parameters: list[Tensor] = list(model.parameters())
    masters: list[Tensor] = [p.detach().float() for p in parameters]
    return _CopyInBf16(model, optimizer_over(masters), setting.batch(cast=True), parameters, masters)


@define(eq=False)
class _CopyInBf16(Training):
    """The model computes in bf16, the optimizer has the weights in fp32."""

    parameters: list[Tensor]
    masters: list[Tensor]

    def update(self) -> None:
        """Gradients to fp32, the step, weights to bf16."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        Training.update(self)
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


@define(eq=False)
class _OwnShard(Training):
    """The model computes its gradients; the optimizer steps on as many elements as this rank's shards would have.

    In bf16 the parts are cast in both directions. Their gradients are not the model's: to bring them there would be
    communication.
    """

    parts: list[Tensor]
    low: list[Tensor]
    """The parts in the dtype that the model computes in."""
    gradients: list[Tensor]

    def update(self) -> None:
        """The step of the parts."""
        self.model.zero_grad()
        for part, gradient in zip(self.parts, self.gradients, strict=True):
            part.grad = gradient.float()
        Training.update(self)
        if self.low[0].dtype != self.parts[0].dtype:
            torch._foreach_copy_(self.low, self.parts)


def floor(setting: Setting) -> Training:
    """Every rank for itself: no communication, no mean."""
    model = setting.model()
    return unsharded(model.bfloat16() if setting.bf16 else model, setting)


def sharded_floor(setting: Setting, *, in_parts: bool = False) -> Training:
    """As `floor`, with the optimizer's work divided among the ranks: one flat tensor, or a part of each parameter."""
    model = setting.model()
    numels = [p.numel() for p in model.parameters()]
    parts: list[Tensor] = [
        torch.randn(-(-numel // setting.group.size)) for numel in (numels if in_parts else [sum(numels)])
    ]
    if setting.bf16:
        model.bfloat16()
    low = [part.bfloat16() if setting.bf16 else part for part in parts]
    gradients = [torch.full_like(part, 1e-3) for part in low]
    return _OwnShard(model, optimizer_over(parts), setting.batch(cast=setting.bf16), parts, low, gradients)
