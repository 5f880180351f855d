"""The process group of eight ranks of which one exists: what it computes, in which order, and what it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from bench.absent import world
from gpu import emulated
from gpu.emulated import BACKEND, RANKS, EmulatedGroup
from gpu.place import Plan, take_device

from flatparam_comm import Collectives, ReduceOp
from flatparam_comm.testing import run_processes
from flatparam_simdev import build
from flatparam_simdev.races import find_races

pytestmark = pytest.mark.processes

SHARD = [1.0, 2.0, 3.0]
REGISTER = "integration_tests.gpu.simulated_device"


def computed(ranks: Collectives, plan: Plan) -> dict[str, object]:
    """What each collective makes of this rank's data, and the bytes that would be on the wire."""
    device = take_device(plan, 0)
    with world(RANKS, BACKEND) as group:
        made = dist.group.WORLD
        assert isinstance(made, EmulatedGroup)
        full = torch.zeros(RANKS * len(SHARD), device=device)
        shard = torch.tensor(SHARD, device=device)
        group.all_gather(full, shard).wait()
        gathered = full.tolist()
        sent_to_gather = made.link.sent
        outputs = {}
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            output = torch.zeros(len(SHARD), device=device)
            group.reduce_scatter(output, full, op=op).wait()
            whole = shard.clone()
            group.all_reduce(whole, op=op).wait()
            outputs[op.name] = [output.tolist(), whole.tolist()]
        exchanged = torch.zeros(RANKS * len(SHARD), device=device)
        own_sizes = [len(SHARD)] * RANKS
        group.all_to_all(exchanged, full, output_numels=own_sizes, given_numels=own_sizes).wait()
        unequal = torch.zeros(RANKS * len(SHARD), device=device)
        numels = [len(SHARD), *range(1, RANKS)]
        given = torch.arange(1.0, 1 + sum(numels), device=device)
        group.all_to_all(unequal, given, output_numels=own_sizes, given_numels=numels).wait()
        outputs["exchanged"] = [exchanged.tolist(), unequal.tolist()]
        full.zero_()
        own = full[: len(SHARD)].copy_(shard)
        group.all_gather(full, own).wait()
        group.barrier()
        in_place = full.tolist()
    return {"gathered": gathered, "in place": in_place, "sent": sent_to_gather, **outputs}


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_everybody_has_the_data_of_the_first(kind: str) -> None:
    """A gather and an exchange are the shard eight times, a sum is eight times the values; bytes are counted."""
    plan = Plan("cpu", 1)
    if kind == "simulated":
        if reason := build.why_not():
            pytest.skip(reason)
        plan = evolve(plan, kind="simulated", imports=(REGISTER,))
    (found,) = run_processes(1, computed, plan)
    times = [RANKS * value for value in SHARD]
    assert found["gathered"] == found["in place"] == SHARD * RANKS
    assert found["SUM"] == [times, times]
    assert found["MAX"] == [SHARD, SHARD]
    assert found["exchanged"] == [SHARD * RANKS, SHARD * RANKS]
    assert found["sent"] == 4 * len(SHARD) * (RANKS - 1)


def races(ranks: Collectives, is_broken: bool) -> list[str]:
    """What the checker finds in a gather whose output is read, perhaps by who does not wait for it."""
    device = take_device(Plan("simulated", 1, imports=(REGISTER,)), 0)
    from flatparam_simdev import device as simulated

    if is_broken:
        waiting: Any = emulated._Under
        waiting.wait = lambda self, timeout=None: True
    with world(RANKS, BACKEND) as group:
        simulated.start_log()
        shard = torch.ones(2, device=device)
        output = torch.empty(2 * RANKS, device=device)
        for _ in range(2):
            shard.mul_(5.0)
            group.all_gather(output, shard).wait()
            output.mul_(2.0)
        return [str(finding) for finding in find_races(simulated.stop_log())]


@pytest.mark.parametrize("is_broken", [False, True])
def test_collectives_are_ordered_by_streams(is_broken: bool) -> None:
    """On an accelerator the group's stream waits for the caller's, and who waits for the collective for the group's."""
    if reason := build.why_not():
        pytest.skip(reason)
    (found,) = run_processes(1, races, is_broken)
    assert bool(found) == is_broken
