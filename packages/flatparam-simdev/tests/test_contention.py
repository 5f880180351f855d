"""The replay on a device that computes one kernel at a time, on logs written by hand.

A product takes a hundred in waves of ten, anything else one.
"""

from __future__ import annotations

from flatparam_simdev import Kind, Task, contended, from_table

from .writing import Writer


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
