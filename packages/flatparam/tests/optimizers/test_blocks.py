"""An optimizer whose state is quantised in blocks: with the rule for its blocks, all bits are those of one process."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel, allow_shards, layout
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, gradient_divisors

from ..worlds import on_ranks

BLOCK = 16


class BlockAdam8bit(torch.optim.Optimizer):
    """Adam whose averages are bytes, with a scale for each block of `BLOCK` elements: a small reference.

    Each element of a state has its block's scale beside it, which a real one would keep once for a block.
    """

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"])

    def _step(self, parameter: torch.Tensor, rate: float) -> None:
        state = self.state[parameter]
        gradient = parameter.grad
        assert gradient is not None
        mean = self._read(state, "mean", parameter).lerp(gradient, 0.1)
        power = self._read(state, "power", parameter).lerp(gradient * gradient, 0.01)
        parameter -= rate * mean / (power.sqrt() + 1e-6)
        self._write(state, "mean", mean)
        self._write(state, "power", power)

    @staticmethod
    def _read(state: Any, name: str, like: torch.Tensor) -> torch.Tensor:
        if f"{name}_bytes" not in state:
            return torch.zeros_like(like)
        return state[f"{name}_bytes"].float() * state[f"{name}_scale"]  # type: ignore[no-any-return]

    @staticmethod
    def _write(state: Any, name: str, value: torch.Tensor) -> None:
        blocks = nn.functional.pad(value.reshape(-1), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        rounded, spread = (blocks / scale).round(), scale.expand_as(blocks)
        state[f"{name}_bytes"], state[f"{name}_scale"] = (
            each.reshape(-1)[: value.numel()].view_as(value).clone() for each in (rounded.to(torch.int8), spread)
        )


def build() -> nn.Module:
    """Sizes that neither a block nor a number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 5))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0, stop: int = 4, copies: int = 1) -> None:
    """Train on batches that are the same on every rank.

    Args:
        copies: take the mean of so many equal gradients, as that many ranks compute it.
    """
    before, after = gradient_divisors(copies)
    for step in range(start, stop):
        optimizer.zero_grad()
        model(torch.randn(4, 7, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        for parameter in model.parameters() if copies > 1 else ():
            parts = [parameter.grad / before for _ in range(copies)]
            parameter.grad = functools.reduce(torch.add, parts) / after
        optimizer.step()


def sharded(world: Collectives, rule: Any, use_orig_params: bool, one_unit: bool) -> Any:
    model = FullyShardedDataParallel(
        build(),
        world,
        auto_wrap_policy=None if one_unit else ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        layout=layout.by({}, otherwise=rule),
    )
    optimizer = BlockAdam8bit(model.parameters())
    allow_shards(optimizer)
    return model, optimizer


def full(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The full values and states, by name."""
    states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    found = dict(model.state_dict())
    return found | {f"{name}/{key}": value for name, own in states.items() for key, value in own.items()}


def in_one_process(ranks: int) -> dict[str, torch.Tensor]:
    """What the plain model and optimizer end with, given the mean of the gradients that `ranks` ranks have."""
    model = build()
    optimizer = BlockAdam8bit(model.parameters())
    train(model, optimizer, copies=ranks)
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    found = dict(model.state_dict())
    return found | {f"{name}/{key}": value for name, own in states.items() for key, value in own.items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert sorted(found) == sorted(expected)
    return all(torch.equal(found[name].view(value.shape), value) for name, value in expected.items())


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("one_unit", [False, True])
def test_states_in_blocks_are_the_same_bits_everywhere(ranks: int, one_unit: bool, use_orig_params: bool) -> None:
    """Under both exposures and wrappings, on 2 to 8 ranks: bytes, scales and parameters are those of one process."""

    def rank(world: Collectives) -> Any:
        model, optimizer = sharded(world, layout.blocks(BLOCK), use_orig_params, one_unit)
        train(model, optimizer)
        return full(model, optimizer)

    expected = in_one_process(ranks)
    assert all(same(found, expected) for found in on_ranks(ranks, rank))


def test_without_the_rule_the_bits_differ(use_orig_params: bool) -> None:
    """Where ranks cut blocks, scales are of other elements: it is the rule that makes the bits the same."""

    def rank(world: Collectives) -> Any:
        model, optimizer = sharded(world, layout.element, use_orig_params, False)
        train(model, optimizer)
        return full(model, optimizer)

    assert not same(on_ranks(4, rank)[0], in_one_process(4))


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 2)])
def test_states_in_blocks_are_resharded(writers: int, readers: int, use_orig_params: bool, tmp_path: Path) -> None:
    """Saved half-way, and resumed on other ranks, in other units and the other exposure, training ends with the same bits."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer

    def save(world: Collectives) -> None:
        model, optimizer = sharded(world, layout.blocks(BLOCK), use_orig_params, True)
        train(model, optimizer, stop=2)
        Checkpointer(tmp_path, model, optimizer, ranks=world).save(step=2)

    def resume(world: Collectives) -> Any:
        model, optimizer = sharded(world, layout.blocks(BLOCK), not use_orig_params, False)
        assert Checkpointer(tmp_path, model, optimizer, ranks=world).load() is not None
        train(model, optimizer, start=2)
        return full(model, optimizer)

    on_ranks(writers, save)
    # The mean of two and of four equal gradients rounds nothing.
    expected = in_one_process(2)
    assert all(same(found, expected) for found in on_ranks(readers, resume))


class OncePerBlock(torch.optim.Optimizer):
    """Momentum in bytes with one scale for each block of 256 elements, under the names of bitsandbytes."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self._step(parameter, self.state[parameter], group["lr"])

    def _step(self, parameter: torch.Tensor, state: Any, rate: float) -> None:
        assert parameter.grad is not None
        mean = parameter.grad.clone()
        if state:
            scales = state["absmax1"].repeat_interleave(256)[: parameter.numel()].view_as(parameter)
            mean += (state["state1"].float() - 128) / 127 * scales
        blocks = nn.functional.pad(mean.reshape(-1), (0, -mean.numel() % 256)).view(-1, 256)
        state["absmax1"] = blocks.abs().amax(1).clamp(min=1e-30)
        codes = (blocks / state["absmax1"].unsqueeze(1) * 127).round() + 128
        state["state1"] = codes.to(torch.uint8).view(-1)[: mean.numel()].view_as(mean).clone()
        parameter -= rate * mean


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 2)])
def test_one_scale_for_a_block_is_resharded(writers: int, readers: int, use_orig_params: bool, tmp_path: Path) -> None:
    """Scales that are kept once for a block, as bitsandbytes does, are saved and found again by ranks that hold others."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer

    def begun(world: Collectives, originals: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 24)),
            world,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=originals,
            layout=layout.by({}, otherwise=layout.blocks(256)),
        )
        optimizer = OncePerBlock(model.parameters())
        allow_shards(optimizer)
        return model, optimizer

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> Any:
        for step in numbers:
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
        return dict(model.state_dict())

    def straight(world: Collectives) -> Any:
        return steps(*begun(world, use_orig_params), range(4))

    def save(world: Collectives) -> None:
        model, optimizer = begun(world, use_orig_params)
        steps(model, optimizer, range(2))
        Checkpointer(tmp_path, model, optimizer, ranks=world).save(step=2)

    def resume(world: Collectives) -> Any:
        model, optimizer = begun(world, not use_orig_params)
        assert Checkpointer(tmp_path, model, optimizer, ranks=world).load() is not None
        return steps(model, optimizer, range(2, 4))

    on_ranks(writers, save)
    expected = on_ranks(writers, straight)[0]
    assert all(same(found, expected) for found in on_ranks(readers, resume))
