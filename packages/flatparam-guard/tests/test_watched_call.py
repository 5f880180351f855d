"""A call of somebody else's function that is watched: whether it is under way, has ended, or has raised."""

from __future__ import annotations

import sys
import threading

import pytest

from flatparam_comm import end_of_call, watch_call
from flatparam_guard.activity import ACTIVITY, WatchedCall


@pytest.fixture(autouse=True)
def own_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with a process that has done nothing."""
    for name, value in (("issued", 0), ("watched", None), ("steps", 0), ("is_in_step", False)):
        monkeypatch.setattr(ACTIVITY, name, value)


def watched() -> WatchedCall:
    """The call that is watched."""
    found = ACTIVITY.watched
    assert found is not None
    return found


def step(*, raises: bool = False) -> bool:
    """A function between two hooks; returns whether it was under way inside."""
    watch_call(sys._getframe(), "step of Optimizer")
    was_under_way = watched().is_under_way
    if raises:
        raise ValueError("inside")
    end_of_call()
    return was_under_way


def test_a_call_that_ends_is_a_step() -> None:
    """Inside, the call is under way; after it nothing is watched, and one more step is counted."""
    assert step()
    assert step()
    assert (ACTIVITY.watched, ACTIVITY.steps, ACTIVITY.is_in_step) == (None, 2, False)


def test_a_call_that_raises_is_none() -> None:
    """It is not under way any more, its exception is known while it is handled, and no step is counted."""
    with pytest.raises(ValueError, match="inside"):
        step(raises=True)
    assert not watched().is_under_way
    assert watched().error is None
    try:
        step(raises=True)
    except ValueError as error:
        assert watched().error is error
    assert (ACTIVITY.steps, ACTIVITY.is_in_step) == (0, True)


def test_a_different_exception_is_not_its() -> None:
    """An exception that is handled now, and did not come out of the call, is not taken for the call's."""
    with pytest.raises(ValueError, match="inside"):
        step(raises=True)
    try:
        raise KeyError("elsewhere")
    except KeyError:
        assert watched().error is None


def test_the_end_of_a_call_that_nobody_watches() -> None:
    """A second hook without a first one, as of an optimizer without sharded parameters, counts nothing."""
    end_of_call()
    assert (ACTIVITY.watched, ACTIVITY.steps) == (None, 0)


def test_a_call_in_a_different_thread() -> None:
    """Any thread sees whether the call is under way in its own; where it was, and after how many collectives."""
    ACTIVITY.issued = 7
    entered, leave = threading.Event(), threading.Event()

    def body() -> None:
        watch_call(sys._getframe(), "step of Optimizer")
        entered.set()
        leave.wait()

    thread = threading.Thread(target=body)
    thread.start()
    entered.wait()
    call = watched()
    assert call.is_under_way
    assert (call.where, call.issued) == ("step of Optimizer", 7)
    leave.set()
    thread.join()
    assert not call.is_under_way
    assert call.error is None
