"""Pipeline stages that are sharded: torch's schedules, gradients of one process, one gather and one reduction a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, clip_grad_norm_, fully_shard
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import ByteLedger, Collectives, ProcessGroupCollectives, RecordingCollectives
from flatparam_comm.testing import run_processes
from flatparam_runtime import summon_full_params

pytestmark = pytest.mark.processes

MICRO_BATCHES = 4
UNITS = 2
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(2 * UNITS)))


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the part of a micro-batch in the mean loss of a step."""
    return F.mse_loss(output, target) / MICRO_BATCHES


def sharded(part: nn.Module, group: Collectives, door: str, keeps: bool) -> Any:
    if door == "wrapper":
        strategy = ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD
        policy = ModuleWrapPolicy({Block})
        return FSDP(part, group, strategy, auto_wrap_policy=policy, use_orig_params=True)
    model: Any = part
    for module in (*part, part):  # type: ignore[misc]
        fully_shard(module, mesh=group, reshard_after_forward=not keeps)
    model.set_reshard_after_backward(not keeps)
    return model


def staged(
    ranks: Collectives, shape: tuple[int, int], schedule: str, door: str, keeps: bool
) -> tuple[float, dict[str, int]]:
    """Compute a step after one that was dropped; returns the largest error of a gradient, and the calls of the step."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    stage, mine = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    span = 2 * UNITS // shape[0]
    ledger = ByteLedger(keep=True)
    group = RecordingCollectives(ProcessGroupCollectives(mesh["dp"].get_group()), ledger)
    part = sharded(build()[span * stage : span * (stage + 1)], group, door, keeps)
    pipe = PipelineStage(part, stage, shape[0], torch.device("cpu"), group=mesh["pp"].get_group())
    run = SCHEDULES[schedule](pipe, n_microbatches=MICRO_BATCHES, loss_fn=loss, scale_grads=False)
    x, target = batch(mine)
    calls: dict[str, int] = {}
    for _ in range(2):
        for parameter in part.parameters():
            parameter.grad = None
        before = len(ledger.transfers)
        with part.accumulate():
            run.step(*([x] if stage == 0 else []), **({"target": target} if stage == shape[0] - 1 else {}))
        part.reduce_gradients()
        ops = [each.op for each in ledger.transfers[before:] if each.sent_nbytes]
        calls = {op: ops.count(op) for op in ("all_gather", "reduce_scatter")}
    norm = clip_grad_norm_(part.parameters(), math.inf) ** 2
    dist.all_reduce(norm, group=mesh["pp"].get_group())
    with summon_full_params(part, with_grads=True):
        named = part.named_parameters()
        found = {name.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for name, p in named}
    alone = build()
    for rank in range(shape[1]):
        inputs, targets = batch(rank)
        (F.mse_loss(alone(inputs), targets) / shape[1]).backward()
    assert float(norm.sqrt()) == pytest.approx(float(nn.utils.get_total_norm(p.grad for p in alone.parameters())))
    wanted = dict(alone[span * stage : span * (stage + 1)].named_parameters())
    assert found.keys() == wanted.keys()
    return max(float((found[name] - each.grad).abs().max()) for name, each in wanted.items()), calls  # type: ignore[operator]


@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 2)], ids=str)
def test_gradients_are_those_of_one_process(shape: tuple[int, int], schedule: str, door: str) -> None:
    """Two stages of two and of one rank, and one stage: each gradient; a step that keeps has one gather a unit."""
    if shape[0] == 1 and schedule == "1F1B":
        pytest.skip("one stage has one order")
    for keeps in (True, False):
        for error, calls in run_processes(shape[0] * shape[1], staged, shape, schedule, door, keeps):
            assert error < 1e-7
            units = 2 * UNITS // shape[0] if shape[1] > 1 else 0
            assert calls["reduce_scatter"] == units
            if keeps:
                assert calls["all_gather"] == units
