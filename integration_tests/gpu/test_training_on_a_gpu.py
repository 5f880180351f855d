"""The wrapper on CUDA: all ranks as threads on one GPU, and NCCL with one process a GPU. The CPU twins are in parity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel, ShardingStrategy
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, ProcessGroupCollectives, run_threads
from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.gpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine")
needs_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks, and there are fewer"
)

WIDTH, BLOCKS, STEPS = 256, 4, 3


class Block(nn.Module):
    """A residual block of one matrix, so that the bytes are easy to count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to its input."""
        return x + torch.relu(self.linear(x))


def build(device: torch.device) -> nn.Module:
    """The same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)


def batch(step: int, rank: int, device: torch.device) -> Tensor:
    """The batch of one rank at one step."""
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)


def local(ranks: int, device: torch.device) -> list[Tensor]:
    """The parameters after training one process on the mean of the ranks' losses."""
    model = build(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        sum(model(batch(step, rank, device)).square().mean() / ranks for rank in range(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


def train(ranks: Collectives, strategy: ShardingStrategy, original: bool, backend: str) -> dict[str, Any]:
    """Train on the GPU of this rank; returns the full parameters and the peak bytes over the shards."""
    device = torch.device("cuda", ranks.rank if backend == "nccl" else 0)
    torch.cuda.set_device(device)
    if backend == "nccl":  # the processes came up with gloo
        ranks = ProcessGroupCollectives(torch.distributed.new_group(backend="nccl"))
    model = FullyShardedDataParallel(
        build(device),
        process_group=ranks,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=original,
        forward_prefetch=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model(batch(step, ranks.rank, device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    rest = torch.cuda.memory_allocated()
    model(batch(0, ranks.rank, device)).square().mean().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - rest
    with FullyShardedDataParallel.summon_full_params(model):
        return {"parameters": [p.detach().cpu() for p in model.parameters()], "peak": peak}


@needs_gpu
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_ranks_that_share_a_gpu_train_as_one_process(strategy: ShardingStrategy, original: bool) -> None:
    """Two ranks as threads on one GPU end with the parameters of one process on the mean of their losses."""
    results = run_threads(2, train, strategy, original, "threads")
    for ours, reference in zip(results[0]["parameters"], local(2, torch.device("cuda")), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-7)


@needs_gpu
def test_peak_on_a_gpu_is_the_formula() -> None:
    """With one rank, FULL_SHARD's peak over the shards is two units, two gradients and the shards' gradients."""
    matrix = WIDTH * WIDTH * 4
    peak = run_threads(1, train, ShardingStrategy.FULL_SHARD, False, "threads")[0]["peak"]
    activations = 64 * BLOCKS * WIDTH * 4  # one row a tensor, with room for the allocator's rounding
    assert peak <= 2 * matrix + 2 * matrix + BLOCKS * matrix + matrix + activations


@needs_gpus
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_nccl_trains_as_one_process(strategy: ShardingStrategy) -> None:
    """Two processes over NCCL, a GPU each, end with the parameters of one process on the mean of their losses."""
    results = run_processes(2, train, strategy, False, "nccl")
    for ours, reference in zip(results[0]["parameters"], local(2, torch.device("cuda:0")), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-7)
