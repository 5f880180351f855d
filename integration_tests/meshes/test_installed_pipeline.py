"""Torch's pipelines reduce the gradients of stages that a program of FSDP2 shards after `flatparam.install()`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatparam
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.processes

MICRO_BATCHES = 4


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def staged(ranks: Collectives, schedule: str, steps: int = 2) -> float:
    """Train the stages of this rank; returns the largest error of a parameter."""
    flatparam.install()
    # After it: they take the names of FSDP2 from torch's modules.
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, mine = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    kind = getattr(pipelining, schedule)
    numbers = [place, place + 2] if "Interleaved" in schedule else [place]
    span = 4 // (2 * len(numbers))
    parts = [layers()[span * number : span * (number + 1)] for number in numbers]
    stages = []
    for number, part in zip(numbers, parts, strict=True):
        for module in (*part, part):
            fully_shard(module, mesh=mesh["dp"])
        device, group = torch.device("cpu"), mesh["pp"].get_group()
        stages.append(pipelining.PipelineStage(part, number, 2 * len(numbers), device, group=group))
    run = kind(stages if len(stages) > 1 else stages[0], MICRO_BATCHES, loss_fn=lambda y, _: y.square().mean())
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    alone = layers()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(steps):
        batches = [torch.full((8, 6), 1.0 + rank + step) for rank in range(2)]
        run.step(*([batches[mine]] if place == 0 else []), **({"target": batches[mine]} if place == 1 else {}))
        sum(alone(batch).square().mean() / 2 for batch in batches).backward()  # type: ignore[union-attr]
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    errors = []
    for number, part in zip(numbers, parts, strict=True):
        wanted = alone[span * number : span * (number + 1)].parameters()
        for p, q in zip(part.parameters(), wanted, strict=True):
            errors.append((p.full_tensor() - q).abs().max().item())  # type: ignore[attr-defined]
    return max(errors)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_a_pipeline_of_fsdp2_trains_as_one_process(schedule: str) -> None:
    """Each parameter after two steps is that of one process on the mean of the ranks' losses, on two by two ranks."""
    assert max(run_processes(4, staged, schedule)) < 1e-6
