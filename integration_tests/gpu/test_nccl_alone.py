"""NCCL with a single rank: the streams and events of many ranks, on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatparam_comm import Collectives, ProcessGroupCollectives, Topology
from flatparam_comm.testing import run_processes
from flatparam_runtime import PrefetchPlan, UnitPlan, shard_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine"),
]

BLOCKS = 4


def build(width: int) -> nn.Sequential:
    """The same layers on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(BLOCKS))).cuda()


def sharded(width: int) -> nn.Sequential:
    """The layers as units over a group of one rank that NCCL serves."""
    group = ProcessGroupCollectives(torch.distributed.new_group(backend="nccl"))
    plan = UnitPlan(Topology(group), prefetch=PrefetchPlan(forward=1))
    model = build(width)
    for layer in model:
        shard_module(layer, plan)
    shard_module(model, plan)
    return model


def train(group: Collectives) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters after three steps, sharded and not."""
    torch.cuda.set_device(0)
    results = []
    for model in (sharded(64), build(64)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).cuda()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    return results[0], results[1]


def test_one_rank_trains_as_one_process() -> None:
    """With NCCL and one rank the parameters are those of a model that is not sharded, bit for bit."""
    ours, local = run_processes(1, train)[0]
    assert all(torch.equal(a, b) for a, b in zip(ours, local, strict=True))


def spans(group: Collectives) -> list[tuple[int, int, int]]:
    """Of each thing that the GPU did in a step: its stream, its begin and its end in nanoseconds."""
    torch.cuda.set_device(0)
    model = sharded(4096)
    x = torch.randn(2048, 4096).cuda()
    for _ in range(2):
        model(x).sum().backward()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        model(x).sum().backward()
        torch.cuda.synchronize()
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]  # it has run
    return [
        (event.device_resource_id(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]


def test_transfers_and_computation_overlap() -> None:
    """A profile of a step shows two streams at work at the same time."""
    found = run_processes(1, spans)[0]
    assert len({stream for stream, _, _ in found}) > 1
    assert any(
        stream != other and begin < stop and start < end for stream, begin, end in found for other, start, stop in found
    )
