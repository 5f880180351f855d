"""How often the host stands still for the device in a step, and from where."""

from __future__ import annotations

from typing import Any, Final

import attrs
import pytest

from integration_tests.simulated.programs import OPTIMIZERS, Outcome, Program, run
from integration_tests.simulated.waits import by_phase
from integration_tests.simulated.worlds import on_simulated

pytestmark = [pytest.mark.processes, pytest.mark.long]


@attrs.frozen
class Row:
    """A program, and how often the host waits in its third step: in each phase in which it does."""

    program: Program
    waits: dict[str, int]


# What the ranks compare has come by the time when the host asks for it a second time. What is offloaded has to be on the
# host before it is stepped there, or scaled, and so has the update of an offloaded matrix. Torch's own scaler reads whether
# a gradient was infinite. Shampoo's roots are taken by `torch.linalg.eigh`, which waits on CUDA: of both sides of each of
# the three matrices that a rank owns.
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
    "offload, muon": Row(Program(offload=True, optimizer="muon"), {"backward": 1, "optimizer": 1}),
    "offload, adafactor": Row(
        Program(offload=True, optimizer="adafactor", use_orig_params=True), {"backward": 1, "optimizer": 1}
    ),
    "shampoo with roots": Row(Program(blocks=2, optimizer="shampoo with roots"), {"optimizer": 6}),
    "offload, evaluation alone": Row(Program(offload=True, scenario="evaluated"), {"forward": 1}),
}


EXPOSURES: Final[dict[str, dict[str, Any]]] = {
    "flat": {},
    "originals": {"use_orig_params": True},
    "fully_shard": {"library": "fully_shard"},
}
WHOLE: Final = ("muon", "adafactor", "transformers adafactor", "shampoo")
NEVER: Final[dict[str, Program]] = {
    **{
        f"{name}, {exposure}": Program(optimizer=name, blocks=2, **options)
        for name in OPTIMIZERS
        if name != "shampoo with roots"
        for exposure, options in EXPOSURES.items()
    },
    **{
        f"{name}, {scenario}": Program(optimizer=name, scenario=scenario, use_orig_params=True)
        for name in WHOLE
        for scenario in ("stepped_in_buckets", "resumed")
    },
    **{
        f"{name}, {strategy}": Program(optimizer=name, strategy=strategy, blocks=2, use_orig_params=True)
        for name in ("muon", "adafactor")
        for strategy in ("none", "hybrid", "hybrid_of_one")
    },
    "muon, bfloat16": Program(optimizer="muon", precision="bfloat16", clip=True, use_orig_params=True),
    "muon, rate": Program(optimizer="muon, rate on the device", use_orig_params=True),
    "adafactor, rate": Program(optimizer="adafactor, rate on the device"),
    "averages, wrapped": Program(scenario="averaged"),
    "averages, fully_shard": Program(scenario="averaged", library="fully_shard", optimizer="muon"),
}
"""Optimizers and whatever is beside them, during whose third step the host waits nowhere."""


@pytest.fixture(scope="module")
def waits() -> dict[str, dict[str, list[str]]]:
    """Of each row, by phase, where the host stood still in the third step, on the first rank."""
    outcomes = on_simulated(2, run, [row.program for row in ROWS.values()])[0]
    return {name: by_phase(o.waits, "step 2") for name, o in zip(ROWS, outcomes, strict=True)}


@pytest.mark.parametrize("name", ROWS)
def test_waits_of_the_host(waits: dict[str, dict[str, list[str]]], name: str) -> None:
    """The host waits so often in each phase, and nowhere else."""
    assert {phase: len(places) for phase, places in waits[name].items()} == ROWS[name].waits, waits[name]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """Of each row of `NEVER`, what each of two ranks has to tell."""
    told = on_simulated(2, run, list(NEVER.values()))
    return dict(zip(NEVER, map(list, zip(*told, strict=True)), strict=True))


@pytest.mark.parametrize("name", NEVER)
def test_no_optimizer_waits(outcomes: dict[str, list[Outcome]], name: str) -> None:
    """The host waits nowhere in a step, nothing races, and the numbers are those of the CPU."""
    for outcome in outcomes[name]:
        assert by_phase(outcome.waits, "step 2") == {}
        assert outcome.findings == []
        assert max(outcome.differences.values()) <= 1e-11
