"""State that an optimizer had before its parameters were sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn, optim

from flatparam_comm import Collectives, Topology
from flatparam_runtime import UnitPlan, shard_module, summon_full_params

from ..models import Stack, batch
from ..worlds import check_same, run, seeded

Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
    "Adam": lambda parameters: optim.Adam(parameters, lr=0.1),
    "AdamW, amsgrad": lambda parameters: optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Rprop": lambda parameters: optim.Rprop(parameters, lr=0.1),
}


class Transposed(Stack):
    """A stack with a weight whose elements are not in row-major order, and a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.blocks[0].up.weight
        self.blocks[0].up.weight = nn.Parameter(weight.detach().t().contiguous().t())
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * self.scale
        return out


def step(module: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
    """A step in which all ranks have one batch."""
    module(batch(0, number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("before", [0, 2], ids=["made before", "stepped before"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_rank_keeps_its_part(name: str, before: int, ranks: int, use_orig_params: bool) -> None:
    """An optimizer that has state when its model is sharded goes on as if the model were not, to the bit."""

    def train(world: Collectives | None) -> dict[str, Tensor | None]:
        module = seeded(Transposed)
        optimizer = OPTIMIZERS[name](module.parameters())
        for number in range(before):
            step(module, optimizer, number)
        if world is not None:
            plan = UnitPlan(Topology(world), use_orig_params=use_orig_params)
            for block in ("blocks.0", "blocks.1"):
                shard_module(module.get_submodule(block), plan)
            shard_module(module, plan)
        for number in range(before, before + 3):
            step(module, optimizer, number)
        if world is None:
            return {each: parameter.detach().clone() for each, parameter in module.named_parameters()}
        with summon_full_params(module):
            return {each: parameter.detach().clone() for each, parameter in module.named_parameters()}

    expected = train(None)
    for found in run(ranks, train):
        check_same(found, expected)
