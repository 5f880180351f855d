"""The profile of the machine that the tests run on: two processes measure it."""

import pytest

from flatparam import PlanError
from flatparam.planning.hardware.named import profile_named


def test_two_ranks_measure_this_machine() -> None:
    """Every number is there and positive, a second question is answered at once, and the name says the transport."""
    found = profile_named("this-machine:gloo")
    assert found.device == "cpu"
    assert found.name == "this machine, gloo"
    assert min(found.flops["float32"], found.memory_bandwidth, found.link.bandwidth, found.launch) > 0
    assert profile_named("this-machine:gloo") is found


def test_a_transport_that_there_is_not() -> None:
    """What two ranks cannot exchange bytes over is refused before anything is measured."""
    with pytest.raises(PlanError, match="expected a hardware profile"):
        profile_named("this-machine:pigeon")
