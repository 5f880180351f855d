"""What is queued in a capture is a graph: what a capture refuses, who takes part in it, and what its memory is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import graph_facts
from .ranks import on_simulated

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What one rank sees."""
    facts: dict[str, Any] = on_simulated(1, graph_facts.of_one)[0]
    return facts


def test_nothing_happens_in_a_capture(facts: dict[str, Any]) -> None:
    """What is captured is not done; each replay does it, with what is in memory then."""
    assert facts["replays"] == {"captured": [1.0, 1.0], "first": [3.0, 3.0], "second": [7.0, 7.0]}


def test_numbers_of_the_host_are_those_of_the_capture(facts: dict[str, Any]) -> None:
    """What the host has computed with, it has computed with once."""
    assert facts["numbers_of_the_host"] == [3.0, 3.0]


@pytest.mark.parametrize("what", graph_facts.REFUSED)
def test_what_a_capture_refuses(facts: dict[str, Any], what: str) -> None:
    """Whatever tells the host of the device raises in a capture, and what the host did before it is as it was."""
    if what == "synchronising the device" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 does not ask this device to wait for everything")
    message, after = facts["refused"][what]
    assert "not permitted when stream is capturing" in message
    assert after == [1.0, 1.0]


def test_streams_take_part_by_events(facts: dict[str, Any]) -> None:
    """A stream takes part once it has waited for an event of the capture, and must be waited for; no other may work."""
    assert facts["streams"]["forked and joined"] == [4.0, 4.0]
    assert "no event has forked" in facts["streams"]["not forked"]
    assert "unjoined work" in facts["streams"]["not joined"]
    assert "uncaptured work" in facts["streams"]["waiting for what was before"]


def test_memory_of_a_graph(facts: dict[str, Any]) -> None:
    """A graph keeps what was allocated in it; a replay that uses memory from outside that is gone is an error."""
    assert facts["memory"]["grown"] > 0
    assert "use after free" in facts["memory"]["error"]
    assert facts["memory"]["left"] == 0
