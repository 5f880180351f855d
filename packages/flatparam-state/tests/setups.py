"""Models that are sharded and trained in a setting, and what their states are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flatparam_comm import Collectives, SingleCollectives, Topology
from flatparam_runtime import UnitPlan, shard_module
from flatparam_state import model_state_dict, optimizer_state_dict

from .models import CASES, Case
from .optimizers import Make, adam
from .worlds import made_up_gradients, step

MLP = CASES["every layer a unit"]
DECAY = 0.9


@attrs.frozen
class Setup:
    """How a model is sharded. Ranks of one shard group of `shards` (by default all) follow each other."""

    world_size: int = 2
    case: Case = MLP
    use_orig_params: bool = False
    shards: int | None = None
    units: tuple[str, ...] | None = None
    early: bool = True
    make: Make = adam

    def topology(self, world: Collectives) -> Topology:
        shards = self.shards or world.size
        if shards == world.size:
            return Topology(world)
        if shards == 1:
            return Topology(SingleCollectives(), world)
        rows = [world.subgroup(range(at, at + shards)) for at in range(0, world.size, shards)]
        columns = [world.subgroup(range(at, world.size, shards)) for at in range(shards)]
        row = next(group for group in rows if group is not None)
        return Topology(row, next(group for group in columns if group is not None))

    def build(self, world: Collectives, seed: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The sharded model of the case and its optimizer."""
        model = self.case.build(seed)
        plan = UnitPlan(
            self.topology(world),
            free_after_forward=self.early,
            free_after_unsynced_backward=self.early,
            use_orig_params=self.use_orig_params,
        )
        ignored = [below for name in self.case.ignored for below in model.get_submodule(name).modules()]
        for name in self.case.units if self.units is None else self.units:
            shard_module(model.get_submodule(name), plan, ignored_modules=ignored)
        return model, self.make(model.parameters())

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
        """Steps with gradients that depend on the number of the step alone."""
        for seed in steps:
            step(model, optimizer, made_up_gradients(self.case.build(), seed))


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Everything, gathered, in memory of its own."""
    model_state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in model_state_dict(model).items()
    }
    return model_state, optimizer_state_dict(model, optimizer)


def assert_equal_state(found: Any, expected: Any) -> None:
    """Assert the same values under the same names, bit for bit; memory order does not count."""
    for mine, theirs in zip(found, expected, strict=True):
        assert_equal_tree(mine, theirs, "")


def assert_equal_tree(found: Any, expected: Any, at: str) -> None:
    """Assert equal types, keys and values."""
    if isinstance(expected, Mapping):
        assert isinstance(found, Mapping), at
        assert set(found) == set(expected), at
        for key, value in expected.items():
            assert_equal_tree(found[key], value, f"{at}/{key}")
    elif isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), at
        assert found.dtype == expected.dtype, at
        assert torch.equal(found, expected), at
    elif at.endswith("params"):
        assert sorted(found) == sorted(expected), at
    elif isinstance(expected, list) and expected and isinstance(expected[0], Mapping):
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_equal_tree(mine, theirs, f"{at}/{index}")
    else:
        assert found == expected, at


def whole(steps: int) -> tuple[nn.Module, nn.Module]:
    """A model in one process, and its average after so many updates."""
    model = MLP.build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for number in range(steps):
        change(model, number)
        average.update_parameters(model)
    return model, average.module


def change(model: nn.Module, step: int) -> None:
    """Change what a rank has of each parameter, element by element."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01).add_(0.01 * step)
