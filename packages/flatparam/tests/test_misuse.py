"""What a sharded model is not for: uneven inputs by torch's Join, and two threads at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from flatparam import FullyShardedDataParallel, fully_shard
from flatparam_comm import Collectives, SingleCollectives, run_threads
from flatparam_core import FlatParamError


class Slow(nn.Module):
    """A layer that lets another thread in while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.is_inside = threading.Event()
        self.may_go_on = threading.Event()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Wait until the other thread has tried."""
        self.is_inside.set()
        assert self.may_go_on.wait(60)
        output: torch.Tensor = self.linear(value)
        return output


def sharded(module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, SingleCollectives(), use_orig_params=True)


def test_join_is_refused() -> None:
    """Join says at its beginning that a rank without inputs has to take part, and how; hasattr raises nothing."""
    model = sharded(nn.Linear(2, 2))
    assert hasattr(model, "join_hook")
    with pytest.raises(FlatParamError, match="rank 0: Join was given a sharded model.*equally many batches"):
        Join([model])  # type: ignore[list-item]  # it is none


def test_torchs_own_sharding_of_optimizers_is_refused() -> None:
    """ZeroRedundancyOptimizer, which would send parts as the whole, is refused before it does; unsharded it is torch's."""

    def refused(ranks: Collectives, wrap: Callable[[nn.Module, Any], nn.Module]) -> str:
        model = wrap(nn.Linear(2, 3), ranks)
        with pytest.raises(FlatParamError) as caught:
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        return str(caught.value)

    def by_originals(module: nn.Module, ranks: Any) -> nn.Module:
        return FullyShardedDataParallel(module, ranks, use_orig_params=True)

    def in_place(module: nn.Module, ranks: Any) -> nn.Module:
        return fully_shard(module, mesh=ranks)

    for wrap in (FullyShardedDataParallel, by_originals, in_place):
        messages = run_threads(2, refused, wrap)
        assert [message[:58] for message in messages] == [
            f"rank {rank}: ZeroRedundancyOptimizer was given parameters of un" for rank in range(2)
        ]
    with pytest.raises(ValueError, match="process group"):
        ZeroRedundancyOptimizer(nn.Linear(2, 3).parameters(), torch.optim.Adam, lr=0.1)


def test_two_threads_at_a_time() -> None:
    """The second thread's call is refused by the name of the unit, and the first one's pass goes on to the right result."""
    torch.manual_seed(0)
    slow = Slow()
    expected = slow.linear(torch.ones(1, 2)).detach().clone()
    model = sharded(slow)
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(model(torch.ones(1, 2))))
    first.start()
    assert slow.is_inside.wait(60)
    with pytest.raises(FlatParamError, match=r"rank 0: unit .* is in the forward pass of another thread"):
        model(torch.ones(1, 2))
    slow.may_go_on.set()
    first.join(60)
    assert torch.equal(results[0], expected)
    results[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_two_threads_one_after_the_other() -> None:
    """A model may be called in one thread and then in another, also after an exception in the first."""
    slow = Slow()
    slow.may_go_on.set()
    model = sharded(slow)

    def fails() -> None:
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join(60)
    model(torch.ones(1, 2)).sum().backward()
