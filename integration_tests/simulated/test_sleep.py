"""`offload` and `onload` on the simulated device: pinned memory, one wait, the bits of the CPU."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from flatparam_simdev.log import Kind
from flatparam_state.moved_memory import PIECE_NBYTES, pieces_of
from integration_tests.simulated.models import WIDTHS
from integration_tests.simulated.programs import Outcome, Program, run
from integration_tests.simulated.worlds import World, on_simulated

pytestmark = [pytest.mark.processes, pytest.mark.long]

PROGRAMS: Final = {
    "flat": Program(scenario="asleep", optimizer="adam"),
    "originals": Program(scenario="asleep", optimizer="adam", use_orig_params=True),
    "grad_op, bfloat16": Program(scenario="asleep", optimizer="fused adam", strategy="grad_op", precision="bfloat16"),
    "none": Program(scenario="asleep", strategy="none"),
    "hybrid": Program(scenario="asleep", strategy="hybrid", use_orig_params=True),
    "in parts": Program(scenario="asleep_in_parts", optimizer="adam", use_orig_params=True),
    "after failures": Program(scenario="asleep_after_failures", optimizer="adam"),
    "on a disk": Program(scenario="asleep_on_a_disk", optimizer="adam"),
    "offloaded, on a disk": Program(scenario="asleep_on_a_disk", optimizer="adam", offload=True),
}
EXCHANGE: Final = "process_group/groups.py"
"""Where ranks tell each other, in a few bytes, whether one has failed."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """What the first rank has to tell of each program."""
    return dict(zip(PROGRAMS, on_simulated(2, run, list(PROGRAMS.values()))[0], strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_goes_on_as_on_the_cpu(outcomes: dict[str, Outcome], name: str) -> None:
    """Nothing races, and parameters are those of the CPU, bit for bit."""
    assert [str(finding) for finding in outcomes[name].findings] == []
    assert set(outcomes[name].differences.values()) == {0.0}


@pytest.mark.parametrize("name", ["flat", "originals", "grad_op, bfloat16", "none", "hybrid"])
def test_the_host_waits_once(outcomes: dict[str, Outcome], name: str) -> None:
    """Each way the host waits once, at the end, and no copy waits; what ranks then tell each other comes beside it."""
    waits = [(phase, wait) for phase, wait in outcomes[name].waits if EXCHANGE not in wait.place]
    for step in range(3):
        for phase in (f"sleep {step}", f"wake {step}"):
            assert [wait.what for at, wait in waits if at == phase] == ["synchronize a stream"]


def pinned_in(outcome: Outcome, phase: str) -> int:
    """The bytes of the host's memory that were pinned in a phase."""
    return sum(r.extra for r in outcome.in_phase(phase) if r.kind is Kind.ALLOCATE and r.name == "pinned")


def of_chain(world: World, most: int) -> tuple[int, int]:
    """The pinned bytes of the third sleep of a chain, and those of its waking."""
    with PIECE_NBYTES.set_to(most):
        (outcome,) = run(world, [Program(scenario="asleep", optimizer="adam", chain=True)])
    return pinned_in(outcome, "sleep 2"), pinned_in(outcome, "wake 2")


@pytest.mark.parametrize("most", [PIECE_NBYTES.default, 2**15])
def test_the_pinned_bytes(most: int) -> None:
    """As many are pinned as `pieces_of` plans for the shards, for as many gradients, and for the two states of each."""
    first, *inner, last = (4 * a * b // 2 for a, b in itertools.pairwise(WIDTHS))
    shards = [first + last, *inner]
    planned = [sum(piece.nbytes for piece in pieces_of(sizes, most)) for sizes in (shards, shards * 2)]
    assert on_simulated(2, of_chain, most)[0] == (2 * planned[0] + planned[1], 0)


def test_what_was_pinned_is_pinned_again(outcomes: dict[str, Outcome]) -> None:
    """Shards that a setting keeps in pinned memory come back from a disk to pinned memory."""
    outcome = outcomes["offloaded, on a disk"]
    assert pinned_in(outcome, "wake 2") == pinned_in(outcome, "wake 0") > 0
