"""A step is captured as a graph and replayed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import attrs
import pytest

from integration_tests.simulated.programs import Outcome, Program, run
from integration_tests.simulated.worlds import World, on_simulated

pytestmark = [pytest.mark.processes, pytest.mark.long]

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


def attempt(world: World, programs: Sequence[Program]) -> list[Outcome | str]:
    """Run each; where all ranks raise, what."""
    return [_attempt(world, program) for program in programs]


def _attempt(world: World, program: Program) -> Outcome | str:
    try:
        return run(world, [program])[0]
    except RuntimeError as error:
        return str(error)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome | str]:
    """What the first rank has to tell of each row, or what was raised."""
    graphed = [attrs.evolve(p, scenario="graphed") if p.scenario == "train" else p for p in ROWS.values()]
    programs = [attrs.evolve(program, steps=6) for program in [*graphed, *REFUSED.values()]]
    return dict(zip([*ROWS, *REFUSED], on_simulated(2, attempt, programs)[0], strict=True))


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
def test_what_needs_the_host_is_refused_by_name(outcomes: dict[str, Outcome | str], name: str, message: str) -> None:
    """What cannot be captured says why, and what to do."""
    assert re.search(message, str(outcomes[name])), outcomes[name]
