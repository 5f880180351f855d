"""Torch's `AveragedModel`, and what is done with it: of a sharded model, and of a copy that was made too early."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, fully_shard
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, FlatParamError
from packages.flatparam.tests.worlds import node_groups, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def in_place(model: nn.Sequential, world: Collectives) -> Any:
    for child in (model[0], model[3]):
        fully_shard(child)
    return fully_shard(model)


def wrapped(**settings: Any) -> Callable[[nn.Module, Collectives], Any]:
    def wrap(model: nn.Module, world: Collectives) -> Any:
        hybrid = settings.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD
        group = node_groups(world) if hybrid else world
        return FSDP(model, group, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **settings)

    return wrap


WAYS: dict[str, Callable[[Any, Collectives], Any]] = {
    "flat": wrapped(),
    "originals": wrapped(use_orig_params=True),
    "flat, grad_op": wrapped(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "originals, hybrid": wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    "flat, none": wrapped(sharding_strategy=ShardingStrategy.NO_SHARD),
    "in place": in_place,
}


def exchange(average: AveragedModel, model: nn.Module) -> None:
    """Give each the values of the other, as Lightning's `WeightAveraging` does around a validation."""
    pairs = zip(
        itertools.chain(average.module.parameters(), average.module.buffers()),
        itertools.chain(model.parameters(), model.buffers()),
        strict=True,
    )
    for one, other in pairs:
        kept = one.data.clone()
        one.data.copy_(other.data)
        other.data.copy_(kept)


def averaging(model: nn.Module, use_buffers: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train, validate with the average in between, and return what the two compute, and the average's state."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outputs = []
    for step in range(4):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        exchange(average, model)
        with torch.no_grad():
            outputs.append(model.eval()(batch(9)))
        exchange(average, model)
        model.train()
    with torch.no_grad():
        outputs.append(average.eval()(batch(9)))
    names = {name.replace("_fsdp_wrapped_module.", ""): each for name, each in average.state_dict().items()}
    return outputs, {name: getattr(each, "full_tensor", each.clone)() for name, each in names.items()}


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_average_of_a_sharded_model(way: str, use_buffers: bool) -> None:
    """Made after sharding, it has the bits of one process: updated, exchanged with the model, evaluated, and saved."""

    def rank(world: Collectives) -> Any:
        return averaging(WAYS[way](build(), world), use_buffers)

    outputs, state = averaging(build(), use_buffers)
    for found, of_average in on_ranks(4, rank):
        assert all(torch.equal(one, other) for one, other in zip(found, outputs, strict=True))
        assert of_average.keys() == state.keys()
        assert all(torch.equal(of_average[name], value) for name, value in state.items())


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lightning's class, as far as it matters here, in the module of its name."""

    class WeightAveraging:
        def __init__(self, average: AveragedModel) -> None:
            self._average_model = average

        def _swap_models(self, pl_module: nn.Module) -> None:
            exchange(self._average_model, pl_module)

    module: Any = types.ModuleType("lightning.pytorch.callbacks.weight_averaging")
    module.WeightAveraging = WeightAveraging
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return WeightAveraging


@pytest.mark.parametrize("way", WAYS)
def test_an_average_of_an_early_copy(way: str, callback: Any) -> None:
    """Made before sharding, it is refused on every rank, by name, before anything is changed."""

    def rank(world: Collectives) -> None:
        model: Any = build()
        average = AveragedModel(model)
        model = WAYS[way](model, world)
        inner = getattr(model, "module", model)
        before = [each.clone() for each in (*average.parameters(), *model.parameters())]
        expected = r"rank \d: {}\(\): .*before the model was sharded.*'0.weight' in the shape \(8, 8\).*ShardedEMA"
        with pytest.raises(FlatParamError, match=expected.format("AveragedModel.update_parameters")):
            average.update_parameters(model)
        with pytest.raises(FlatParamError, match=expected.format("WeightAveraging._swap_models")):
            callback(average)._swap_models(inner)
        after = (*average.parameters(), *model.parameters())
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert average.n_averaged == 0

    on_ranks(4, rank)


def test_early_copies_of_what_a_rank_has_whole(callback: Any) -> None:
    """Where the model shows whole parameters, an early copy is right: summoned, or original parameters that are not sharded."""

    def rank(world: Collectives, way: str) -> dict[str, Tensor]:
        model = build()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        sharded = (
            WAYS[way](model, world)
            if way != "whole"
            else wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)(model, world)
        )
        for _ in range(3):
            with torch.no_grad():
                for parameter in sharded.parameters():
                    parameter.mul_(1.5)
            if way == "whole":
                average.update_parameters(sharded)
                callback(average)._swap_models(sharded)
                callback(average)._swap_models(sharded)
            else:
                with FSDP.summon_full_params(sharded, writeback=False):
                    average.update_parameters(sharded)
        return average.module.state_dict()

    model = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        average.update_parameters(model)
    for way in ("whole", "flat", "originals"):
        for found in on_ranks(2, rank, way):
            assert all(torch.equal(found[name], value) for name, value in average.module.state_dict().items())
