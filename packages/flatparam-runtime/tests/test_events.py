"""The events that units report to instruments, and the schedule that can be read from them."""

from __future__ import annotations

import attrs
import pytest
from torch import nn

from flatparam_comm import Collectives, SingleCollectives
from flatparam_runtime import Event, EventLog, Instrument, Phase, observe, units_in

from .models import Stack, batch
from .worlds import run, sharded


def event(kind: str, unit: str, nbytes: int, phase: Phase = Phase.IDLE) -> Event:
    return Event(kind, unit, phase, nbytes)  # type: ignore[arg-type]  # a literal, from a parameter


def test_an_event_is_a_fact() -> None:
    """Events are compared by their fields, and cannot be changed."""
    assert event("use", "a", 4) == event("use", "a", 4)
    assert event("use", "a", 4) != event("use", "b", 4)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        event("use", "a", 4).nbytes = 3  # type: ignore[misc]  # that is the test


def test_lines_are_the_schedule() -> None:
    """``lines`` is kind and unit of each event, in order."""
    log = EventLog([event("unshard", "(root)", 8), event("use", "(root)", 8), event("reshard", "a.b", 4)])
    assert log.lines() == ["unshard (root)", "use (root)", "reshard a.b"]


def step(module: nn.Module, rank: int = 0) -> None:
    module(batch(rank)).sum().backward()


FULL_SHARD = """\
unshard (root)
use (root)
unshard blocks.0
use blocks.0
reshard blocks.0
unshard blocks.1
use blocks.1
reshard blocks.1
unshard blocks.1
unshard blocks.0
use blocks.1
reshard blocks.1
reduce blocks.1
use blocks.0
reshard blocks.0
finish blocks.1
reduce blocks.0
reshard (root)
finish blocks.0
reduce (root)
finish (root)""".splitlines()


def test_the_schedule_of_one_step(ranks: int) -> None:
    """One step of full sharding, event by event: the root's parameters stay, gradients overlap with the next unit.

    In backward ``blocks.1`` is prefetched for the root, and ``blocks.0`` before ``blocks.1`` is waited for.
    """

    def schedule(collectives: Collectives) -> list[str]:
        module = sharded(Stack, collectives, units=["blocks.0", "blocks.1"])
        log = EventLog()
        with observe(module, log):
            step(module, collectives.rank)
        return log.lines()

    for lines in run(ranks, schedule):
        assert lines == FULL_SHARD


def test_the_schedule_with_an_input_that_needs_a_gradient() -> None:
    """The schedule is the same if the gradient of the input, and not the end of the pass, tells that the root is done."""
    module = sharded(Stack, SingleCollectives(), units=["blocks.0", "blocks.1"])
    log = EventLog()
    with observe(module, log):
        module(batch().requires_grad_()).sum().backward()
    assert log.lines() == FULL_SHARD


def test_events_carry_phase_and_bytes() -> None:
    """Each event has the phase in which it happened, and the bytes of the memory it is about."""
    module = sharded(Stack, SingleCollectives(), units=["blocks.0", "blocks.1"])
    log = EventLog()
    with observe(module, log):
        step(module)
    block, root = 36 * 4, (20 + 15) * 4
    for each in log.events:
        assert each.nbytes == (root if each.unit == "(root)" else block), each
    phases = [(each.kind, each.phase) for each in log.events if each.unit == "blocks.1"]
    assert phases == [
        ("unshard", Phase.FORWARD),
        ("use", Phase.FORWARD),
        ("reshard", Phase.IDLE),
        # Prefetched for the unit when the root's backward began.
        ("unshard", Phase.IDLE),
        ("use", Phase.BACKWARD),
        ("reshard", Phase.BACKWARD),
        ("reduce", Phase.REDUCING),
        ("finish", Phase.REDUCING),
    ]


def test_what_is_taken_is_given_back() -> None:
    """Over a whole step every unshard has its reshard and every reduce its finish, with the same bytes."""
    module = sharded(Stack, SingleCollectives(), units=["blocks.0", "blocks.1"], free_after_forward=False)
    log = EventLog()
    with observe(module, log):
        step(module)
    for taken, given in (("unshard", "reshard"), ("reduce", "finish")):
        for name in {each.unit for each in log.events}:
            mine = [each for each in log.events if each.unit == name]
            assert sum(e.nbytes for e in mine if e.kind == taken) == sum(e.nbytes for e in mine if e.kind == given)


def test_observing_ends_with_the_context() -> None:
    """Outside of ``observe`` no event is reported, even after an exception inside; several instruments get the same."""
    module = sharded(Stack, SingleCollectives(), units=["blocks.0", "blocks.1"])
    first, second = EventLog(), EventLog()
    instruments: list[Instrument] = [first, second]
    with observe(module, instruments[0]), observe(module.blocks, instruments[1]):
        step(module)
    heard = len(first.events)
    assert [e for e in first.events if e.unit != "(root)"] == second.events
    with pytest.raises(ZeroDivisionError), observe(module, first):
        raise ZeroDivisionError
    step(module)
    assert len(first.events) == heard
    assert not any(unit.observers.instruments for unit in units_in(module))


def test_the_schedule_is_the_same_in_every_run() -> None:
    """Ten worlds of two threads with forward prefetching give the same events on each rank, event by event."""

    def schedule(collectives: Collectives) -> list[Event]:
        module = sharded(Stack, collectives, units=["blocks.0", "blocks.1"])
        log = EventLog()
        with observe(module, log):
            for _ in range(2):
                step(module, collectives.rank)
        return log.events

    first = run(2, schedule)
    assert first[0] == first[1]
    for _ in range(9):
        assert run(2, schedule) == first


@attrs.define(eq=False)
class Waits:
    """An instrument that also hears of waits, and keeps all as lines."""

    heard: list[str] = attrs.field(factory=list)

    def on_event(self, event: Event) -> None:
        self.heard.append(f"{event.kind} {event.unit}")

    def on_wait(self, unit: str, operation: str) -> None:
        self.heard.append(f"wait {operation} {unit}")


def test_waits_are_told_to_the_instruments_that_ask_for_them() -> None:
    """Each use and each finish has its wait before it, and nothing of the unit between; other instruments hear none."""

    def schedule(collectives: Collectives) -> tuple[list[str], list[str]]:
        module = sharded(Stack, collectives, units=["blocks.0", "blocks.1"])
        log, waits = EventLog(), Waits()
        with observe(module, log), observe(module, waits):
            step(module, collectives.rank)
        return log.lines(), waits.heard

    for lines, heard in run(2, schedule):
        assert [line for line in heard if not line.startswith("wait ")] == lines == FULL_SHARD
        for kind, operation in (("use", "all_gather"), ("finish", "reduce_scatter")):
            ends = [number for number, line in enumerate(heard) if line.startswith(f"{kind} ")]
            assert ends
            for number in ends:
                assert heard[number - 1] == f"wait {operation} {heard[number].partition(' ')[2]}"
