"""Parameters that are frozen, thawed or given data between passes of one accumulation: gradients as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel, ShardingStrategy
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives

from .worlds import on_ranks

WORLD_SIZE: Final = 2
Waits: TypeAlias = Callable[[], AbstractContextManager[Any]]


def rows(seed: int) -> torch.Tensor:
    """The batch of this number."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


class Run:
    """A model, its parameters by name, and the passes over it: batch `k` of every rank."""

    def __init__(self, model: nn.Module, ranks: range, waits: Waits, names: Mapping[str, nn.Parameter]) -> None:
        """Train over the batches of `ranks`; `waits` is `no_sync`, or nothing for one process."""
        self._model, self._ranks, self._waits = model, ranks, waits
        self.weight, self.bias, self.first = names["1.weight"], names["1.bias"], names["0.weight"]

    def forward(self, batch: int) -> torch.Tensor:
        """The mean of the losses of the batch of each rank."""
        losses = [self._model(rows(100 * rank + batch)).square().mean() / len(self._ranks) for rank in self._ranks]
        return sum(losses, torch.zeros(()))

    def train(self, batch: int, *, waits: bool = False) -> None:
        """A forward and a backward pass, whose gradients wait for the next pass with `waits`."""
        with self._waits() if waits else nullcontext():
            self.forward(batch).backward()


@contextmanager
def frozen(*parameters: nn.Parameter) -> Iterator[None]:
    """Inside, these parameters are not trained."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    yield
    for parameter in parameters:
        parameter.requires_grad_(True)


def thaw(run: Run) -> None:
    """A parameter is frozen in the pass that waits."""
    with frozen(run.weight):
        run.train(0, waits=True)
    run.train(1)


def freeze(run: Run) -> None:
    """A parameter is frozen after the pass that waits."""
    run.train(0, waits=True)
    run.weight.requires_grad_(False)
    run.train(1)


def freeze_between(run: Run) -> None:
    """A parameter is frozen in the second of three passes."""
    run.train(0, waits=True)
    with frozen(run.weight):
        run.train(1, waits=True)
    run.train(2)


def freeze_module(run: Run) -> None:
    """All parameters of a module are frozen for one synchronised pass."""
    run.train(0, waits=True)
    with frozen(run.weight, run.bias):
        run.train(1)
    run.train(2)


def look(run: Run) -> None:
    """A forward pass without a backward pass sees frozen parameters."""
    run.train(0, waits=True)
    with frozen(run.weight, run.bias):
        run.forward(1)
    run.train(2)


def take_turns(run: Run) -> None:
    """Two parameters are frozen and thawed at different times."""
    run.train(0, waits=True)
    with frozen(run.first):
        with frozen(run.weight):
            run.train(1, waits=True)
        run.train(2, waits=True)
    run.train(3)


def give_data(run: Run) -> None:
    """Parameters get other data between a pass that waits and the next one."""
    run.train(0, waits=True)
    for parameter in (run.weight, run.bias):
        parameter.data = parameter.data.clamp(-0.1, 0.1)
    run.train(1)


def build() -> nn.Module:
    """Three layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("by_layer", [False, True], ids=["one unit", "units"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("program", [thaw, freeze, freeze_between, freeze_module, look, take_turns, give_data])
def test_changes_between_passes(program: Callable[[Run], None], strategy: str, by_layer: bool) -> None:
    """Every parameter has the gradient of one process, whatever was gathered, kept or frozen in between."""
    alone = build()
    names = dict(alone.named_parameters())
    program(Run(alone, range(WORLD_SIZE), nullcontext, names))
    expected = {name: parameter.grad for name, parameter in names.items()}

    def rank(world: Collectives) -> dict[str, torch.Tensor | None]:
        model = FullyShardedDataParallel(
            build(),
            world,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if by_layer else None,
            clean_names=True,
        )
        program(Run(model, range(world.rank, world.rank + 1), model.no_sync, dict(model.named_parameters())))
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }

    for found in on_ranks(WORLD_SIZE, rank):
        for name, gradient in expected.items():
            assert gradient is not None
            torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
