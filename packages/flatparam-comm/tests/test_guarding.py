"""The seam to a guard: what a process does without one, and that it finds and calls the one that is there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from flatparam_comm import (
    CollectiveError,
    PeerError,
    ProcessGroupCollectives,
    SingleCollectives,
    addons,
    end_of_call,
    guarding,
    resolve_topology,
    survivors_of,
    tell_failure,
    watch_call,
)
from flatparam_comm.testing import run_processes
from flatparam_comm.topology import transports


@pytest.fixture
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(guarding, "module_behind", lambda *names: None)
    monkeypatch.setattr(transports, "module_behind", lambda *names: None)
    for cached in (guarding.guard, transports.shared_memory_transport):
        cached.cache_clear()
    yield
    for cached in (guarding.guard, transports.shared_memory_transport):
        cached.cache_clear()


def _without_a_guard(comm: ProcessGroupCollectives) -> tuple[list[str], str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flatparam_comm").addHandler(handler)
    # The guard that is installed, if one is, is not asked.
    guarding.guard.cache_clear()
    guarding.module_behind = lambda *names: None  # type: ignore[assignment]
    for number in range(3):
        value = torch.ones(4)
        comm.all_reduce(value, label=f"step {number}").wait()
        assert value.tolist() == [comm.size] * 4
    pair = comm.subgroup([0, 1])
    assert pair is not None
    pair.barrier()
    if comm.rank == 1:
        tell_failure(ValueError("mine"))
        torch.distributed.destroy_process_group()
        return said, ""
    with pytest.raises(CollectiveError) as raised:
        for _ in range(100):
            pair.all_reduce(torch.ones(4), label="never").wait()
    assert not isinstance(raised.value, PeerError)
    return said, str(raised.value)


@pytest.mark.processes
def test_without_a_guard_collectives_work_and_errors_are_the_backends() -> None:
    """Sums are right, one line of the log says what is missing, and a lost peer is a CollectiveError of the backend."""
    (said, text), (also_said, _) = run_processes(2, _without_a_guard)
    assert [line.startswith("flatparam-guard is not installed: ") for line in said] == [True]
    assert said == also_said
    assert text.startswith("rank 0: all_reduce 'never': the process group failed with ")
    assert "look for the first error among the other ranks" in text


@pytest.mark.usefixtures("_nothing_installed")
def test_without_a_guard_nothing_is_told() -> None:
    """Failures and steps can be told to nobody, and ranks that want to meet after a failure are told what is missing."""
    tell_failure(ValueError("mine"), "a place", is_final=True)
    watch_call(sys._getframe(), "a step")
    end_of_call()
    with pytest.raises(CollectiveError, match="expected a guard.*pip install flatparam-guard"):
        survivors_of(SingleCollectives(), None, 1.0)


@pytest.mark.usefixtures("_nothing_installed")
def test_without_a_transport_its_name_is_refused() -> None:
    """ "shared_memory" says which add-on is lacking, before anything is made."""
    with pytest.raises(ModuleNotFoundError, match="add-on flatparam-onehost for 'shared_memory'.*pip install"):
        resolve_topology("shared_memory")


def _auto(comm: ProcessGroupCollectives) -> tuple[str, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flatparam_comm").addHandler(handler)
    transports.shared_memory_transport.cache_clear()
    transports.module_behind = lambda *names: None  # type: ignore[assignment]
    kinds = {type(resolve_topology("auto").shard).__name__ for _ in range(2)}
    return kinds.pop(), [line for line in said if "onehost" in line]


@pytest.mark.processes
def test_without_a_transport_auto_is_the_process_group() -> None:
    """ "auto" takes the process group, and one line of the log says what is missing."""
    for kind, said in run_processes(2, _auto):
        assert kind == "ProcessGroupCollectives"
        assert [line.startswith("flatparam-onehost is not installed: ") for line in said] == [True]


class _Point:
    """An entry point of somebody else's guard."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def load(self) -> Any:
        return self.module


def test_an_installed_guard_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that an entry point names is taken, even if ours can be imported, too."""
    module = ModuleType("theirs")
    asked: list[tuple[str, str]] = []

    def entry_points(*, group: str, name: str) -> list[_Point]:
        asked.append((group, name))
        return [_Point(module)]

    monkeypatch.setattr(addons, "entry_points", entry_points)
    assert addons.module_behind("flatparam.guard", "guard", "flatparam_comm") is module
    assert asked == [("flatparam.guard", "guard")]
    monkeypatch.setattr(addons, "entry_points", lambda **names: [])
    assert addons.module_behind("flatparam.guard", "guard", "flatparam_comm") is sys.modules["flatparam_comm"]
    assert addons.module_behind("flatparam.guard", "guard", "no_such_module") is None
