"""Written schedules, and how one is recorded.

A schedule is a text of ``kind unit`` pairs; blank space and what follows a ``#`` mean nothing. The kinds are those of
:class:`flatparam_runtime.Event`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from flatparam_comm import Collectives
from flatparam_runtime import EventLog, observe
from integration_tests.parity.programs import Loss
from integration_tests.parity.sharded import Setting, optimizer_of, wrap
from integration_tests.parity.zoo import Case

Passes = Callable[[nn.Module, Loss], Iterator[str]]
"""Runs forward and backward passes; yields a name for what has happened since it yielded last."""


def lines(text: str) -> list[str]:
    """The events of a written schedule, as ``"kind unit"``."""
    words = [word for line in text.splitlines() for word in line.partition("#")[0].split()]
    return [f"{kind} {unit}" for kind, unit in zip(words[::2], words[1::2], strict=True)]


def record(group: Collectives, case: Case, setting: Setting, passes: Passes, *, step: int) -> dict[str, list[str]]:
    """What the events of ``passes`` were in this step, by their names; the steps before are run alike."""
    model = wrap(case, setting, group)
    optimizer = optimizer_of(model, setting)
    recorded: dict[str, list[str]] = {}
    for _number in range(step + 1):
        log = EventLog()
        recorded.clear()
        optimizer.zero_grad()
        with observe(model, log):
            for name in passes(model, functools.partial(case.loss, model, rank=group.rank)):
                recorded[name] = log.lines()
                log.events.clear()
        optimizer.step()
    return recorded


def one_step(model: nn.Module, loss: Loss) -> Iterator[str]:
    """A forward and a backward pass."""
    value = loss(0)
    yield "forward"
    value.backward()
    yield "backward"


def accumulate(model: nn.Module, loss: Loss) -> Iterator[str]:
    """A micro-batch in no_sync, and one that synchronises."""
    with model.no_sync():
        value = loss(0)
        yield "quiet forward"
        value.backward()
        yield "quiet backward"
    value = loss(1)
    yield "forward"
    value.backward()
    yield "backward"


def evaluate(model: nn.Module, loss: Loss) -> Iterator[str]:
    """A forward pass without recording."""
    with torch.no_grad():
        loss(0)
    yield "evaluation"
