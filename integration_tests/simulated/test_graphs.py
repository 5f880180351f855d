"""A step is captured as a graph and replayed."""

from __future__ import annotations

import re
from typing import Any, Final

import attrs
import pytest

from integration_tests.simulated import graph_facts
from integration_tests.simulated.programs import Outcome, Program
from integration_tests.simulated.worlds import on_simulated

pytestmark = pytest.mark.processes

ROWS: Final = {
    "FULL_SHARD": Program(),
    "originals": Program(use_orig_params=True),
    "SHARD_GRAD_OP": Program(strategy="grad_op"),
    "NO_SHARD": Program(strategy="none"),
    "hybrid": Program(strategy="hybrid_of_one"),
    "bfloat16": Program(precision="bfloat16"),
    "clipped": Program(clip=True),
    "checkpointing": Program(checkpointing="not reentrant"),
    "accumulation": Program(micro_batches=2, no_sync=True),
    "matrices": Program(optimizer="muon", chain=True),
    "new gradients": Program(scenario="graphed_with_new_gradients"),
    "evaluation": Program(scenario="evaluation_graphed"),
    "FSDP2": Program("fsdp2"),
    "FSDP2, evaluation": Program("fsdp2", scenario="evaluation_graphed"),
}
"""What is captured; where nothing else is said, a whole step."""

REFUSED: Final = {
    "FSDP1": Program("fsdp1", scenario="graphed"),
    "offload": Program(offload=True, scenario="graphed"),
    "first pass": Program(scenario="graphed_at_once"),
    "counted steps": Program(optimizer="adafactor", scenario="graphed"),
}
"""What cannot be captured. FSDP1's host waits before each gather, so that it does not run too far ahead."""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What one rank sees."""
    facts: dict[str, Any] = on_simulated(1, graph_facts.of_one)[0]
    return facts


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome | str]:
    """What the first rank has to tell of each row, or what was raised."""
    graphed = [attrs.evolve(p, scenario="graphed") if p.scenario == "train" else p for p in ROWS.values()]
    programs = [attrs.evolve(program, steps=6) for program in [*graphed, *REFUSED.values()]]
    return dict(zip([*ROWS, *REFUSED], on_simulated(2, graph_facts.attempt, programs)[0], strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_a_step_is_captured(outcomes: dict[str, Outcome | str], name: str) -> None:
    """Forward, backward and optimizer are one graph; its replays with new batches have the bits of the CPU's steps."""
    outcome = outcomes[name]
    assert isinstance(outcome, Outcome), outcome
    assert [str(finding) for finding in outcome.findings] == []
    assert not any(outcome.differences.values()), outcome.differences


def test_fsdp1_cannot_be_captured(outcomes: dict[str, Outcome | str]) -> None:
    """A library whose host waits is refused: FSDP1's does before each gather, so that it does not run too far ahead."""
    assert "not permitted when stream is capturing: synchronize an event" in str(outcomes["FSDP1"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "offload",
            r"is being captured in a graph, but its gradients are offloaded, so that the host has to look",
        ),
        (
            "first pass",
            r"its first pass is being captured in a graph.*run a few steps on a side stream before",
        ),
        ("counted steps", r"is being captured in a graph, but the optimizer counts its steps on the host"),
    ],
)
def test_what_needs_the_host_is_refused_by_name(
    outcomes: dict[str, Outcome | str], name: str, message: str
) -> None:
    """What cannot be captured says why, and what to do."""
    assert re.search(message, str(outcomes[name])), outcomes[name]


def test_nothing_happens_in_a_capture(facts: dict[str, Any]) -> None:
    """What is captured is not done; each replay does it, with what is in memory then."""
    assert facts["replays"] == {"captured": [1.0, 1.0], "first": [3.0, 3.0], "second": [7.0, 7.0]}


def test_numbers_of_the_host_are_those_of_the_capture(facts: dict[str, Any]) -> None:
    """What the host has computed with, it has computed with once."""
    assert facts["numbers_of_the_host"] == [3.0, 3.0]


@pytest.mark.parametrize("what", graph_facts.REFUSED)
def test_what_a_capture_refuses(facts: dict[str, Any], what: str) -> None:
    """Whatever tells the host of the device raises in a capture, and what the host did before it is as it was."""
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
