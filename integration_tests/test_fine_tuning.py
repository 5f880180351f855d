"""Weights from files, their average and the rest between two phases, in processes that torch connects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flatparam import Checkpointer, FullyShardedDataParallel, ShardedEMA, ShardingStrategy, load_pretrained
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

DECAY = 0.9


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fine_tuned(world: Collectives, folder: Path, strategy: str) -> dict[str, Any]:
    """Load, train with an average, leave for a while, train on, save, and load all of it into a different model."""
    arguments: dict[str, Any] = {
        "auto_wrap_policy": ModuleWrapPolicy({nn.Linear}),
        "sharding_strategy": ShardingStrategy[strategy],
    }
    model, report = load_pretrained(make, folder / "model.safetensors", output_loading_info=True, **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = ShardedEMA(model, DECAY)
    assert isinstance(model, FullyShardedDataParallel)
    for number in range(4):
        step(model, optimizer, number)
        ema.update()
        assert model.offload(folder=folder, optimizer=optimizer) > 0
        model.onload(optimizer=optimizer)
    with Checkpointer(folder / strategy, model, optimizer, averages=ema) as checkpointer:
        checkpointer.save(4)
    torch.manual_seed(5)
    other = FullyShardedDataParallel(make(), use_orig_params=True)
    of_other = ShardedEMA(other, DECAY)
    Checkpointer(folder / strategy, other, torch.optim.AdamW(other.parameters()), averages=of_other).load()
    with of_other.applied(other):
        averages = {name: value.clone() for name, value in other.state_dict().items()}
    return {
        "model": other.state_dict(),
        "averages": averages,
        "read": report.nbytes_read,
        "nbytes": report.nbytes,
    }


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_from_files_to_an_average(strategy: str, tmp_path: Path) -> None:
    """Two processes end with the model and the average of one process, to the bit, and have read each byte once."""
    torch.manual_seed(0)
    whole = make()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    average = AveragedModel(whole, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for number in range(4):
        step(whole, optimizer, number)
        average.update_parameters(whole)
    found = run_processes(2, fine_tuned, tmp_path, strategy)
    for each in found:
        for name, value in whole.state_dict().items():
            assert torch.equal(each["model"][name], value), name
            assert torch.equal(each["averages"][name], average.module.state_dict()[name]), name
    assert sum(each["read"] for each in found) == found[0]["nbytes"]
