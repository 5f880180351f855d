"""The benchmark's step in small: only what is exact, never a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench.contenders import CONTENDERS, FLOOR, FLOORS, SHARDED_FLOOR
from bench.counts import count
from bench.figures import exact, quartiles_of_ratios, timings
from bench.memory import Allocator
from bench.rounds import COLUMNS, measure
from bench.training import Training, optimizer_over
from bench.workloads import WORKLOADS, Workload

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

RANKS = 2
NAMES = [name for name, contender in CONTENDERS.items() if contender.is_here]
OURS = [name for name in NAMES if name.startswith("flatparam")]
FINGERPRINT = 16
"""Bytes that the ranks compare beside a byte for each parameter; docs/memory.md."""

pytestmark = [pytest.mark.processes, pytest.mark.long]

Counted = dict[str, dict[str, Any]]


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("tiny wide", "tiny many")]


@pytest.fixture(scope="module", params=["tiny small", *LONG])
def workload(request: pytest.FixtureRequest) -> str:
    """The name of a workload."""
    return str(request.param)


@pytest.fixture(scope="module")
def counted(workload: str) -> Counted:
    """What is counted of every contender in fp32."""
    counts = [c for c, _ in run_processes(RANKS, measure, workload, False, NAMES, 0.0)]
    return exact(counts)


def test_everybody_trains_to_the_same_losses(workload: str, counted: Counted) -> None:
    """All that average gradients have, bit for bit, the losses of the plain model on the mean of both ranks' losses."""
    # A process like theirs, with as many threads.
    (expected,) = run_processes(1, losses_on_the_mean, workload)
    losses = {name: counted[name]["losses"] for name in NAMES if name not in FLOORS}
    assert {name: found for name, found in losses.items() if found != expected} == {}, expected


def losses_on_the_mean(group: Collectives, name: str) -> list[float]:
    """The losses of rank 0's batch, before each step of the plain model on the mean over the ranks' batches."""
    workload = WORKLOADS[name]
    model = workload.seeded()
    training = Training(model, optimizer_over(list(model.parameters())), workload.batch_of(0))
    found = []
    for _ in range(3):
        for rank in range(RANKS):
            loss = model(*workload.batch_of(rank))
            if rank == 0:
                found.append(loss.item())
            # One after the other: in one backward pass the parts of a tied parameter's gradient are added in another
            # order than on the ranks, and on some processors that changes the last bit.
            (loss / RANKS).backward()
        training.update()
    return found


@pytest.mark.parametrize("name", OURS)
def test_bytes_are_those_of_the_formula(workload: str, counted: Counted, name: str) -> None:
    """A step sends what docs/memory.md says, and under FULL_SHARD less than FSDP1, else as much beside the flags."""
    units, root = unit_nbytes(WORKLOADS[workload])
    parameters = len(list(WORKLOADS[workload].model().parameters()))
    gathered = 0 if "NO_SHARD" in name else sum(units) + root
    reduced = sum(units) + root
    if "SHARD" not in name:
        gathered += sum(units[:-1])  # the last one is kept from the forward pass
    if "NO_SHARD" in name:
        reduced *= 2  # an all-reduce
    sent = (gathered + reduced) // RANKS + parameters + FINGERPRINT
    assert counted[name]["sent"] == sent
    peer = "torch FSDP1" + (" SHARD_GRAD_OP" if "SHARD" in name else "")
    assert sent - parameters - FINGERPRINT <= counted[peer]["sent"]
    if "SHARD" not in name:
        assert sent < counted[peer]["sent"]


def unit_nbytes(workload: Workload) -> tuple[list[int], int]:
    """Bytes of the parameters of each unit, and of those outside; the sizes here need no padding."""
    model = workload.model()
    units = [m for m in model.modules() if isinstance(m, workload.unit)]
    of_units = [4 * sum(p.numel() for p in unit.parameters()) for unit in units]
    return of_units, 4 * sum(p.numel() for p in model.parameters()) - sum(of_units)


def test_collectives(workload: str, counted: Counted) -> None:
    """One more than FSDP1's gathers and reductions, in which ranks compare; under FULL_SHARD a gather less, too."""
    for name in OURS:
        if "NO_SHARD" not in name:
            peer = "torch FSDP1" + name.removeprefix("flatparam").replace(", shared memory", "")
            assert counted[name]["collectives"] == counted[peer]["collectives"] + ("SHARD" in name)


def test_memory_at_rest(workload: str, counted: Counted) -> None:
    """With original parameters, no more is left after a step than with FSDP1."""
    assert counted["flatparam, original"]["at_rest"] <= counted["torch FSDP1, original"]["at_rest"]


@pytest.mark.parametrize("exposure", ["", ", original"])
@pytest.mark.parametrize("transport", ["", ", shared memory"])
def test_peaks(workload: str, counted: Counted, exposure: str, transport: str) -> None:
    """Under FULL_SHARD FSDP1 needs no less memory at its worst moment, over gloo as through shared memory."""
    peak = counted[f"flatparam{exposure}{transport}"]["peak"]
    assert peak <= counted[f"torch FSDP1{exposure}"]["peak"]


def allocations(group: Collectives) -> tuple[int, int]:
    """What `Allocator` says of 3,000 bytes that are made and resized to 1,000, and 100 that last."""
    held: list[torch.Tensor] = []

    def action() -> None:
        buffer = torch.empty(3000, dtype=torch.uint8)
        held.append(torch.empty(100, dtype=torch.uint8))
        buffer.untyped_storage().resize_(0)
        buffer.untyped_storage().resize_(1000)

    memory = Allocator().during(action)
    return memory.peak, memory.at_rest


def test_memory_is_exact() -> None:
    """The peak is every byte at the worst moment; what is at rest is what lasts."""
    assert run_processes(1, allocations) == [(3100, 100)]


def counts_twice(group: Collectives, name: str) -> list[dict[str, Any]]:
    return [count(group, WORKLOADS["tiny small"], False, CONTENDERS[name]) for _ in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["flatparam", "flatparam, original"])
def test_counts_are_the_same_in_every_run(name: str) -> None:
    """Operators, collectives and bytes, those at rest too, do not depend on what ran before."""
    for first, second in run_processes(RANKS, counts_twice, name):
        # The first run imports something, and gloo's threads drop what they hold when they get to it.
        exact_counts = first.keys() - {"python_calls", "peak"}
        assert {key: first[key] for key in exact_counts} == {key: second[key] for key in exact_counts}


def test_ratios_are_taken_round_by_round() -> None:
    """A contender that is twice the floor in each round is 2.0, however the rounds differ."""
    assert quartiles_of_ratios([2.0, 20.0, 8.0], [1.0, 10.0, 4.0]) == [2.0, 2.0, 2.0]


def test_a_step_is_the_slower_ranks_and_cpu_time_that_of_both() -> None:
    """`timings` joins the ranks: seconds by their maximum, CPU time by their sum."""

    def rank(seconds: float) -> dict[str, list[list[float]]]:
        sample = dict.fromkeys(COLUMNS, seconds) | {"system": 0.0}
        floor = dict.fromkeys(COLUMNS, 1.0) | {"system": 0.0}
        return {
            name: [[s[column] for column in COLUMNS]] * 3
            for name, s in ((FLOOR, floor), (SHARDED_FLOOR, floor), ("x", sample))
        }

    row = timings([rank(2.0), rank(3.0)])["x"]
    assert (row["step"], row["user"], row["x_floor"], row["x_cpu"]) == (3.0, 5.0, [3.0] * 3, [2.5] * 3)
