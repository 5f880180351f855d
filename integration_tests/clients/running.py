"""Run a program of a client in a process of its own, and read the losses that its ranks print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Final

import pytest

from flatparam_comm.testing import PATIENCE

__all__ = ["OURS", "PROGRAMS", "Losses", "after", "assert_goes_on", "losses_in", "output_of"]

PROGRAMS: Final = Path(__file__).resolve().parent / "programs"
OURS: Final = ("-m", "flatparam", "run")

Losses = dict[tuple[int, int], tuple[float, ...]]
"""By rank and step."""


def output_of(*arguments: object) -> str:
    """What the ranks print; they end well."""
    quiet = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **quiet},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        # Gloo's threads can end a process that is about to exit, with torch's FSDP1, too.
        if done.returncode == 0 or "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def losses_in(output: str, run: tuple[str, ...]) -> Losses:
    """The losses that the ranks print; the class of their models is flatparam's if `run` is, and otherwise torch's.

    Programs print each line in one piece, with a line break before it too: torchrun's ranks write text and line break
    apart, so that a line of one rank may come between the two of another.
    """
    lines = [words for words in map(str.split, output.splitlines()) if words]
    module = "flatparam" if run else "torch"
    assert {words[1].split(".")[0] for words in lines if words[0] == "class"} == {module}
    return {(int(words[1]), int(words[2])): tuple(map(float, words[3:])) for words in lines if words[0] == "loss"}


def after(steps: int, losses: Losses) -> Losses:
    """Those of the steps that a run has left that is resumed after `steps`."""
    return {key: value for key, value in losses.items() if key[1] >= steps}


def assert_goes_on(resumed: Losses, losses: Losses, first: int, *, ranks: int) -> None:
    """A run that was resumed at step `first`, on `ranks` ranks, has the means of the run that went on, up to rounding."""
    steps = range(first, 1 + max(step for _, step in losses))
    assert sorted(resumed) == [(rank, step) for rank in range(ranks) for step in steps]
    expected = _means(losses)
    for step, values in _means(resumed).items():
        assert values == pytest.approx(expected[step], rel=1e-4), f"step {step} on {ranks} ranks"


def _means(losses: Losses) -> dict[int, tuple[float, ...]]:
    """By step, what the ranks print on average."""
    found: dict[int, list[tuple[float, ...]]] = {}
    for (_, step), values in losses.items():
        found.setdefault(step, []).append(values)
    return {step: tuple(map(fmean, zip(*values, strict=True))) for step, values in found.items()}
