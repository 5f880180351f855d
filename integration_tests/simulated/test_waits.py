"""How often the host stands still for the device in a step, and from where."""

from __future__ import annotations

from typing import Final

import attrs
import pytest

from integration_tests.simulated.programs import Program, run
from integration_tests.simulated.waits import by_phase
from integration_tests.simulated.worlds import on_simulated

pytestmark = pytest.mark.processes


@attrs.frozen
class Row:
    """A program, and how often the host waits in its third step: in each phase in which it does."""

    program: Program
    waits: dict[str, int]


# What the ranks compare has come by the time when the host asks for it a second time. What is offloaded has to be on the
# host before it is stepped there, or scaled. Torch's own scaler reads whether a gradient was infinite.
ROWS: Final = {
    "training": Row(Program(), {}),
    "training, clipped": Row(Program(clip=True), {}),
    "training, accumulated": Row(Program(micro_batches=2, no_sync=True), {}),
    "training, NO_SHARD": Row(Program(strategy="none"), {}),
    "training, hybrid": Row(Program(strategy="hybrid_of_one"), {}),
    "training, bfloat16": Row(Program(precision="bfloat16"), {}),
    "training and evaluation": Row(Program(evaluate=True), {}),
    "evaluation alone": Row(Program(scenario="evaluated"), {}),
    "scaled": Row(Program(scenario="scaled"), {"optimizer": 1}),
    "offload": Row(Program(offload=True), {"backward": 1}),
    "offload, clipped": Row(Program(offload=True, clip=True), {"backward": 1, "clip": 1}),
    "offload, evaluation alone": Row(Program(offload=True, scenario="evaluated"), {"forward": 1}),
}


@pytest.fixture(scope="module")
def waits() -> dict[str, dict[str, list[str]]]:
    """Of each row, by phase, where the host stood still in the third step, on the first rank."""
    outcomes = on_simulated(2, run, [row.program for row in ROWS.values()])[0]
    return {name: by_phase(o.waits, "step 2") for name, o in zip(ROWS, outcomes, strict=True)}


@pytest.mark.parametrize("name", ROWS)
def test_waits_of_the_host(waits: dict[str, dict[str, list[str]]], name: str) -> None:
    """The host waits so often in each phase, and nowhere else."""
    assert {phase: len(places) for phase, places in waits[name].items()} == ROWS[name].waits, waits[name]
