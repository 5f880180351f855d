"""Bugs that are planted are found: what has no findings could have had some."""

from __future__ import annotations

import pytest

from integration_tests.simulated.programs import Outcome, Program, run
from integration_tests.simulated.worlds import on_simulated

pytestmark = pytest.mark.processes

PLANTED = [
    (Program(plant="gathers are not waited for"), "all_gather"),
    (Program("fsdp1", plant="gathers are not waited for"), "all_gather"),
    (Program("fsdp2", plant="gathers are not waited for"), "all_gather"),
    (Program(plant="reductions are not waited for"), "reduce_scatter"),
    (Program(plant="gradients are freed early"), "reused too early"),
    (Program("fsdp1", plant="gradients are freed early"), "reused too early"),
    (Program("fsdp1", plant="streams are not recorded"), "reused too early"),
    (Program("fsdp1", offload=True, plant="the host does not wait"), "race over pinned memory"),
]
"""A program with a bug, and words of what is found."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """What the first of two ranks has to tell, by the program's name."""
    told = on_simulated(2, run, [program for program, _ in PLANTED])[0]
    return {outcome.program.name: outcome for outcome in told}


@pytest.mark.parametrize(("program", "words"), PLANTED, ids=[program.name for program, _ in PLANTED])
def test_planted_bugs_are_found(outcomes: dict[str, Outcome], program: Program, words: str) -> None:
    """Each planted bug is found, by what it does wrong."""
    findings = [str(finding) for finding in outcomes[program.name].findings]
    assert any(words in finding for finding in findings), findings


def test_a_host_that_does_not_wait_computes_nonsense(outcomes: dict[str, Outcome]) -> None:
    """A copy that is read before it lands does not only count as a race: the parameters are wrong."""
    outcome = outcomes[Program("fsdp1", offload=True, plant="the host does not wait").name]
    assert max(outcome.differences.values()) > 1000
