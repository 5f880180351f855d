"""The model of these tests, and its training on one process: what every checkpoint is compared with.

Nothing in here knows of sharding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn

State: TypeAlias = dict[str, Any]

#: The steps before a checkpoint, and those that go on from it.
BEFORE = range(2)
AFTER = range(2, 4)


class Codec(nn.Module):
    """Two modules with one weight, whose 35 elements no world size here divides."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Embedding(7, 5)
        self.decode = nn.Linear(5, 7, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(tokens)))


class Normed(nn.Module):
    """A convolution and a norm with buffers, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 3)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Frozen(nn.Module):
    """A layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Sample(nn.Module):
    """Units (see `UNITS`) with a tie, buffers, frozen parameters, and a root of its own with very small parameters.

    With `mixed` a parameter of the root is frozen too. torch's FSDP1 takes that with use_orig_params=True only, and it
    takes no 0-d parameters at all.
    """

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.codec = Codec()
        self.normed = Normed()
        self.frozen = Frozen()
        self.row = nn.Parameter(torch.randn(1, 3))
        self.gain = nn.Parameter(torch.randn(1))
        self.head = nn.Linear(3, 3)
        self.head.bias.requires_grad_(not mixed)
        self.register_buffer("shift", torch.randn(2, 3))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.codec(tokens)  # batch, 3, 7
        x = self.normed(x)  # batch, 5, 5
        x = self.frozen(x) * self.row + self.shift.mean(0)
        return self.head(x) * self.gain


UNITS = (Codec, Normed, Frozen)


def build(mixed: bool = False, seed: int = 0) -> Sample:
    """The same model at each call with the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Sample(mixed)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss of a rank in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randint(0, 7, (4, 3), generator=generator)).square().mean()


def adamw(parameters: Any, **settings: Any) -> torch.optim.AdamW:
    """The optimizer of these tests: two tensors and a counter for each parameter, and a decay that is seen at once."""
    return torch.optim.AdamW(parameters, **{"lr": 0.01, "weight_decay": 0.5, **settings})


def train(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    rank: int,
    steps: Sequence[int] = BEFORE,
) -> list[float]:
    """Train a wrapped model as its rank, and return the losses."""
    found = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    losses = []
    for step in steps:
        for optimizer in found:
            optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        for optimizer in found:
            optimizer.step()
        losses.append(loss.item())
    return losses


@attrs.frozen(eq=False)
class Trained:
    """What the unsharded model is before the checkpoint, and after the steps that follow it."""

    model: State
    """Parameters and buffers by name, those of rank 0 where a buffer depends on a rank's examples."""
    optimizer: dict[str, State]
    """By the name of the parameter, by the name of the state."""
    end: State
    end_optimizer: dict[str, State]


@functools.cache
def trained(mixed: bool = False, ranks: int = 2) -> Trained:
    """The unsharded model, trained on the mean of the losses of that many ranks."""
    model = build(mixed)
    optimizer = adamw(model.parameters())
    _train_alone(model, optimizer, ranks, BEFORE)
    model_state, optimizer_state = copied(model.state_dict()), named_state(model, optimizer)
    _train_alone(model, optimizer, ranks, AFTER)
    return Trained(model_state, optimizer_state, copied(model.state_dict()), named_state(model, optimizer))


def _train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int, steps: Sequence[int]) -> None:
    for step in steps:
        of_ranks, buffers = [], copied(dict(model.named_buffers()))
        kept = buffers
        for rank in range(ranks):
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            of_ranks.append([p.grad for p in model.parameters()])
            if rank == 0:
                kept = copied(dict(model.named_buffers()))
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
        for parameter, grads in zip(model.parameters(), zip(*of_ranks, strict=True), strict=True):
            parameter.grad = None if grads[0] is None else sum(grads[1:], grads[0]) / ranks
        optimizer.step()


def copied(state: State) -> State:
    """The same tensors with memory of their own."""
    return {name: value.detach().clone() for name, value in state.items()}


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, State]:
    """A copy of the state of an unsharded model's optimizer, by parameter name."""
    return {
        name: copied(optimizer.state[parameter])
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


#: Buffers that depend on the examples of a rank, so that they are not the same on all.
OF_RANK = ("normed.norm.running_mean", "normed.norm.running_var")

Build: TypeAlias = Callable[..., nn.Module]
