"""Adam in eight bits, bitsandbytes' and torchao's: with their blocks kept whole, the bits of one process, everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import Checkpointer, FullyShardedDataParallel, allow_shards, layout
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"))
    for name in ("bitsandbytes", "torchao")
]
UNITS: Mapping[str, Any] = {"one unit": None, "layers": ModuleWrapPolicy({nn.Linear})}
SETTINGS: list[Any] = [pytest.param(ranks, units, id=f"{ranks}, {units}") for ranks in (1, 2, 4) for units in UNITS]
STEPS = 4


def kind_of(name: str) -> Any:
    return import_module(f"{name}.optim").AdamW8bit


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its step, which takes a minute and changes no bit that is compared here."""
    monkeypatch.setattr(torch, "compile", lambda function, *args, **settings: function)


def build() -> nn.Module:
    """Matrices of many blocks, and vectors shorter than one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 96), nn.LayerNorm(96))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0, stop: int = STEPS) -> None:
    """Train on batches that are the same on every rank: the mean of 2 or 4 equal gradients rounds nothing."""
    for step in range(start, stop):
        optimizer.zero_grad()
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


def sharded(name: str, ranks: Collectives, units: str, *, rules: Any = None) -> Any:
    kind = kind_of(name)
    model = FullyShardedDataParallel(
        build(),
        ranks,
        auto_wrap_policy=UNITS[units],
        use_orig_params=True,
        layout=layout.for_optimizer(kind) if rules is None else rules,
    )
    optimizer = kind(model.parameters(), lr=1e-2)
    allow_shards(optimizer)
    return model, optimizer


def alone(name: str) -> dict[str, torch.Tensor]:
    model = build()
    train(model, kind_of(name)(model.parameters(), lr=1e-2))
    return dict(model.state_dict())


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("ranks", "units"), SETTINGS)
def test_training_has_the_bits_of_one_process(name: str, ranks: int, units: str) -> None:
    """At every world size and wrapping, also where a rank has nothing of some parameters."""

    def rank(world: Collectives) -> Any:
        model, optimizer = sharded(name, world, units)
        train(model, optimizer)
        return dict(model.state_dict())

    expected = alone(name)
    for found in run_threads(ranks, rank):
        assert_same(found, expected)


@pytest.mark.parametrize("name", KINDS)
def test_without_the_rule_the_bits_differ(name: str) -> None:
    """Cut anywhere, blocks are of other elements, and short parts are not quantised at all."""

    def rank(world: Collectives) -> Any:
        model, optimizer = sharded(name, world, "one unit", rules=layout.by({}))
        train(model, optimizer)
        return dict(model.state_dict())

    expected = alone(name)
    found = run_threads(4, rank)[0]
    assert any(not torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", ["directory", "full"])
@pytest.mark.parametrize(("writers", "readers"), [(1, 4), (2, 4), (4, 2), (4, 1)])
def test_states_are_resharded(name: str, form: str, writers: int, readers: int, tmp_path: Path) -> None:
    """Saved half-way, and resumed on other ranks and in other units, training ends with the bits of one process."""

    def save(world: Collectives) -> Any:
        model, optimizer = sharded(name, world, "one unit")
        train(model, optimizer, stop=2)
        if form == "directory":
            Checkpointer(tmp_path, model, optimizer, ranks=world).save(step=2)
            return None
        return dict(model.state_dict()), FullyShardedDataParallel.optim_state_dict(model, optimizer)

    told = run_threads(writers, save)[0]

    def resume(world: Collectives) -> Any:
        model, optimizer = sharded(name, world, "layers")
        if form == "directory":
            assert Checkpointer(tmp_path, model, optimizer, ranks=world).load() is not None
        else:
            model.load_state_dict(told[0])
            loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, told[1])
            optimizer.load_state_dict(loaded)
        train(model, optimizer, start=2)
        return dict(model.state_dict())

    expected = alone(name)
    for found in run_threads(readers, resume):
        assert_same(found, expected)
