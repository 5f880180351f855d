"""The other half of every test here: ours, in a world of threads, beside the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel
from flatparam_comm import Collectives, run_threads
from integration_tests.parity.models import Block
from integration_tests.parity.runs import assert_same_tensors, gradients_of
from integration_tests.parity.zoo import batch, seeded

Build = Callable[[], nn.Module]
Wrap = Callable[[nn.Module, Collectives], nn.Module]

FSDP = FullyShardedDataParallel
STEPS = 3


def blocks() -> nn.Module:
    """Two blocks and a layer; the same in every call."""
    return seeded(lambda: nn.Sequential(Block(4), Block(4), nn.Linear(4, 2)))()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss of a rank in a step."""
    return model(batch(step, rank, 3, 4)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a state of its own."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    rank: int,
    steps: Sequence[int] = range(STEPS),
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train a wrapped model as its rank."""
    optimizer = optimizer or sgd(model)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def train_alone(model: nn.Module, ranks: int, steps: Sequence[int] = range(STEPS)) -> nn.Module:
    """Train an unsharded model on the mean of the losses of that many ranks, and return it."""
    optimizer = sgd(model)
    for step in steps:
        give_gradients(model, [gradient_of(model, [step], rank) for rank in range(ranks)])
        optimizer.step()
    return model


def gradient_of(model: nn.Module, steps: Sequence[int], rank: int) -> dict[str, Tensor | None]:
    """What an unsharded model has for a rank after the backward passes of these steps."""
    model.zero_grad()
    for step in steps:
        loss_of(model, step, rank).backward()
    return gradients_of(model)


def give_gradients(model: nn.Module, of_ranks: Sequence[dict[str, Any]], divide: float | None = None) -> None:
    """Have an unsharded model hold the ranks' mean, or their sum divided by another number.

    Of neighbours first, then of pairs: where each pair is a shard group this is the order in which ours adds.
    """
    for name, parameter in model.named_parameters():
        terms = [gradients[name] for gradients in of_ranks]
        while len(terms) > 1:
            terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
        parameter.grad = terms[0] / (divide or len(of_ranks))


def assert_trains_as_one(build: Build, wrap: Wrap, ranks: int = 2) -> None:
    """Demand that a wrapped model, trained on that many ranks, has the bits of the unsharded one."""

    def rank(group: Collectives) -> dict[str, Any]:
        model = wrap(build(), group)
        train(model, group.rank)
        return model.state_dict()

    expected = train_alone(build(), ranks).state_dict()
    for state in run_threads(ranks, rank):
        assert_same_tensors(state, expected, "after training:")


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every gradient of a wrapped model, whole, by the names of the unwrapped one."""
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return gradients_of(model)


def hybrid(group: Collectives) -> tuple[Collectives, Collectives]:
    """For four ranks: neighbours share the parameters, and there are two copies."""
    shards = [group.subgroup(ranks) for ranks in ([0, 1], [2, 3])]
    copies = [group.subgroup(ranks) for ranks in ([0, 2], [1, 3])]
    return next(filter(_mine, shards)), next(filter(_mine, copies))  # type: ignore[return-value]


def _mine(group: Collectives | None) -> bool:
    return group is not None
