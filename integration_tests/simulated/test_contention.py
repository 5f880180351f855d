"""The copies that feed collectives come between the waves of a product, and not after it."""

from __future__ import annotations

from typing import Any, Final

import pytest

from integration_tests.simulated.contention import contended
from integration_tests.simulated.log import Kind
from integration_tests.simulated.overlap import STEP
from integration_tests.simulated.programs import Outcome, Program, run
from integration_tests.simulated.replay import Costs, Task, from_table, replay
from integration_tests.simulated.worlds import World, on_simulated
from integration_tests.simulated.writing import Writer

# The replay, on logs written by hand: a product takes a hundred in waves of ten, anything else one


def schedule(log: Writer) -> dict[str, Task]:
    """When each operator runs, by its name."""
    cost = from_table({"aten::mm": 100.0, "aten::bmm": 100.0}, otherwise=1.0)
    tasks = contended(log.records, cost, wave=10.0, latency=0.5).tasks
    return {task.record.name: task for task in tasks}


def test_kernels_run_one_after_the_other() -> None:
    """A kernel of another stream waits for one that has begun, with all of its waves."""
    log = Writer()
    log.kernel(0, "aten::mm")
    log.kernel(1, "aten::copy_")
    tasks = schedule(log)
    assert (tasks["aten::mm"].begin, tasks["aten::mm"].end) == (0, 100)
    assert (tasks["aten::copy_"].begin, tasks["aten::copy_"].end) == (100, 101)


def test_what_is_urgent_comes_between_two_waves() -> None:
    """A kernel of a stream with a high priority overtakes what is left of a product, and what is queued behind it."""
    log = Writer()
    log.prioritise(1, -1)
    log.kernel(0, "aten::add")
    log.order(0, 1)
    log.kernel(0, "aten::mm")
    log.kernel(0, "aten::bmm")
    log.kernel(1, "aten::copy_")
    log.use(Kind.COLLECTIVE, 1, "all_gather")
    tasks = schedule(log)
    # It is ready after the product has begun, since it has waited for another stream.
    assert (tasks["aten::copy_"].begin, tasks["all_gather"].end) == (11, 13)
    assert (tasks["aten::mm"].end, tasks["aten::bmm"].end) == (102, 202)


def test_communication_runs_beside_computing() -> None:
    """A collective needs no kernel's place."""
    log = Writer()
    log.use(Kind.COLLECTIVE, 1, "all_gather")
    log.kernel(0, "aten::mm")
    assert schedule(log)["all_gather"].end == 1


def test_a_wait_is_for_all_that_was_queued() -> None:
    """What waits for an event begins after all that was on its stream, or that this stream had waited for."""
    log = Writer()
    log.kernel(0, "aten::mm")
    log.order(0, 1)
    log.order(1, 2)
    log.kernel(2, "aten::copy_")
    assert schedule(log)["aten::copy_"].begin == 100.5


# Programs

ROWS: Final[dict[str, dict[str, Any]]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"strategy": "grad_op"},
    "hybrid": {"strategy": "hybrid_of_one"},
    "originals": {"use_orig_params": True},
    "fully_shard": {"library": "fully_shard"},
}
COSTS: Final = Costs(communication=190.0)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Of each row: what a rank has to tell of training in bfloat16, whose gathers need a cast."""
    common = {"precision": "bfloat16", "scenario": "one_unit_ahead", "blocks": 6}
    told = on_simulated(2, run, [Program(**common, **row) for row in ROWS.values()])[0]
    return dict(zip(ROWS, told, strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("row", ROWS)
def test_casts_do_not_wait_for_products(outcomes: dict[str, Outcome], row: str) -> None:
    """Where kernels share the device, a step is as long as where they do not, within 1 %; without priorities by 3 % longer.

    A unit computes for 200, and a gather takes 190: it has to begin soon after the unit does.
    """
    log = outcomes[row].log
    equal = [record for record in log if record.kind is not Kind.PRIORITY]
    alone = replay(log, COSTS).step(STEP).length
    shared, without = (
        contended(each, COSTS, wave=5.0, latency=0.1).step(STEP).length for each in (log, equal)
    )
    assert shared <= 1.01 * alone
    assert without >= 1.03 * alone


def copied(world: World, has_priorities: bool) -> tuple[list[float], list[int]]:
    """What is copied to the device and back, and the priorities of the streams."""
    import torch

    from flatparam_comm.transfer.accelerator import Streams
    from integration_tests.simulated import device

    with device.behaving("has_priorities", has_priorities):
        device.start_log()
        streams = Streams(world.device)
        with streams.uploading() as up:
            there = streams.to_device(torch.tensor([1.0, 2.0]), world.device)
        assert up.end is not None
        up.end.wait()
        with streams.downloading() as down:
            back = streams.to_host(there)
        assert down.end is not None
        down.end.synchronize()
        records = device.stop_log()
    return back.tolist(), [record.extra for record in records if record.kind is Kind.PRIORITY]


@pytest.mark.processes
@pytest.mark.parametrize("has_priorities", [True, False])
def test_devices_without_priorities_work(has_priorities: bool) -> None:
    """Both streams for copies have the high priority; where the device refuses it, they are ordinary ones."""
    ((values, priorities),) = on_simulated(1, copied, has_priorities)
    assert values == [1.0, 2.0]
    assert priorities == ([-1, -1] if has_priorities else [])
