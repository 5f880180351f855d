"""Unequal work through the wrapper and `fully_shard`: training is that of one process that does every micro-batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatparam_sums
from flatparam import (
    BackwardPrefetch,
    CPUOffload,
    ShardingStrategy,
    fully_shard,
)
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.optim import Muon
from flatparam.sharded_grad_scaler import ShardedGradScaler
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads
from flatparam_comm.testing import run_processes
from flatparam_runtime import summon_full_params
from flatparam_state import ShardedEMA

STEPS = 7


class Block(nn.Module):
    """Two layers, recomputed or not."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.up, self.down, self.recomputes = nn.Linear(6, 8), nn.Linear(8, 6), recomputes

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.recomputes else self.compute(x)


def build(recomputes: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(recomputes) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 6), *blocks, nn.Linear(6, 3)).double()


def batches(step: int) -> list[tuple[Tensor, int]]:
    """The micro-batches of a step, and their weights; there may be none."""
    generator = torch.Generator().manual_seed(step)
    count = int(torch.randint(0, 9, (1,), generator=generator))
    sizes = torch.randint(1, 7, (count,), generator=generator).tolist()
    return [(torch.randn(size, 5, generator=generator, dtype=torch.float64), size) for size in sizes]


def rank_of(step: int, number: int, size: int) -> int:
    """The rank of a micro-batch: in the first steps all are the first rank's, or the last one's, later any rank's."""
    return 0 if step < 2 else size - 1 if step < 4 else random.Random(f"{step} {number}").randrange(size)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def flat(parameters: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def full(model: nn.Module) -> Tensor:
    with summon_full_params(model):
        return flat(model.parameters()).clone()


def one_process(max_norm: float | None = None) -> Tensor:
    """Return the parameters of one process that does every micro-batch."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = sum(size for _, size in batches(step))
        for x, size in batches(step):
            (loss(model, x) * (size / total)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return flat(model.parameters())


def trained(model: Any, ranks: Collectives, *, clips: bool = False) -> Tensor:
    """Train a sharded model; returns its full parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for number, (x, size) in enumerate(batches(step)):
            if rank_of(step, number, ranks.size) == ranks.rank:
                with model.accumulate(weight=size):
                    loss(model, x).backward()
        model.reduce_gradients()
        if clips:
            model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            # What happens between steps on every rank does not disturb what ranks without work follow.
            model.eval()
            with torch.no_grad():
                model(torch.ones(1, 5, dtype=torch.float64))
            model.train()
    return full(model)


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "originals": {"use_orig_params": True},
    "grad op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "prefetches after": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "prefetches nothing": {"backward_prefetch": None},
    "prefetches forward": {"forward_prefetch": True},
    "offloads": {"cpu_offload": CPUOffload(True)},
}


def wrapped(ranks: Any, kind: str, recomputes: bool = False) -> FSDP:
    return FSDP(build(recomputes), process_group=ranks, auto_wrap_policy=ModuleWrapPolicy({Block}), **KINDS[kind])


@pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated")
@pytest.mark.parametrize("recomputes", [False, True], ids=["", "recomputes"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapper(kind: str, recomputes: bool) -> None:
    """Whatever the strategy, exposure and prefetching, three ranks train as one process does."""
    # As FSDP1, the wrapper takes norms in float32.
    expected = one_process(max_norm=0.1)
    for found in run_threads(3, lambda ranks: trained(wrapped(ranks, kind, recomputes), ranks, clips=True)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("frees", [True, False])
def test_fully_shard(frees: bool) -> None:
    """The method is the same behind `fully_shard`."""

    def rank(ranks: Collectives) -> Tensor:
        model = build()
        for module in (model[1], model[2], model[3], model):
            fully_shard(module, mesh=ranks, reshard_after_forward=frees)
        return trained(model, ranks)

    for found in run_threads(2, rank):
        torch.testing.assert_close(found, one_process(), rtol=1e-9, atol=1e-12)


class Accumulating(nn.Linear):
    """Has a method of its own of a name that `fully_shard` brings along."""

    def accumulate(self, x: Tensor) -> Tensor:
        return self(x) + 1


def test_a_method_of_the_users() -> None:
    """A class that has a method `accumulate` keeps it; the function of the add-on does the rest."""

    def rank(ranks: Collectives) -> None:
        model = fully_shard(Accumulating(2, 2), mesh=ranks)
        x = torch.ones(1, 2)
        assert torch.equal(model.accumulate(x), model(x) + 1)
        with flatparam_sums.accumulate(model, weight=3):
            model.accumulate(x).sum().backward()
        flatparam_sums.reduce_gradients(model)
        assert all(p.grad is not None for p in model.parameters() if p.numel())

    run_threads(2, rank)


def over(ranks: Collectives, transport: str) -> Tensor:
    return trained(wrapped(None if transport == "gloo" else transport, "full"), ranks)


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_processes(transport: str) -> None:
    """Processes over gloo and over shared memory, too."""
    for found in run_processes(2, over, transport):
        torch.testing.assert_close(found, one_process(), rtol=1e-9, atol=1e-12)


def scaled(ranks: Collectives) -> tuple[Tensor, list[float]]:
    """Train with a scaler, of which one step overflows, and averages; returns parameters and scales."""
    model = wrapped(ranks, "originals")
    optimizer, scaler = (
        torch.optim.AdamW(model.parameters(), lr=0.01),
        ShardedGradScaler(device="cpu", init_scale=4.0),
    )
    averages, scales = ShardedEMA(model, 0.5), []
    for step in range(STEPS):
        for number, (x, size) in enumerate(batches(step)):
            if rank_of(step, number, ranks.size) == ranks.rank:
                factor = float("inf") if (step, number) == (5, 0) else 1.0
                with model.accumulate(weight=size):
                    scaler.scale(loss(model, x) * factor).backward()
        model.reduce_gradients()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        averages.update()
        scales.append(scaler.get_scale())
    with averages.applied(model):
        return full(model), scales


def test_a_scaler_and_averages() -> None:
    """An overflow on one rank skips the step on all, and the rest is as on one rank."""
    [(expected, scales)] = run_threads(1, scaled)
    assert scales == [4.0] * 5 + [2.0] * 2
    for found, told in run_threads(3, scaled):
        assert told == scales
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def of_matrices(ranks: Collectives) -> Tensor:
    model = wrapped(ranks, "originals")
    optimizer = Muon(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for number, (x, size) in enumerate(batches(step)):
            if rank_of(step, number, ranks.size) == ranks.rank:
                with model.accumulate(weight=size):
                    loss(model, x).backward()
        model.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return full(model)


def test_whole_matrices() -> None:
    """Muon steps whole matrices of such gradients."""
    [expected] = run_threads(1, of_matrices)
    for found in run_threads(3, of_matrices):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
