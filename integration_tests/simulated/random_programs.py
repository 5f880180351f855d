"""Random programs of `integration_tests.programs`, the same ones each time, as jobs of a rank."""

from __future__ import annotations

import warnings
from typing import Any

import hypothesis

from flatparam_comm import Collectives
from integration_tests.programs.recipes import Configuration, Program
from integration_tests.programs.running import NothingToReduceError, run_sharded, thresholds_of
from integration_tests.programs.strategies import SINGLE, cases


def drawn(count: int) -> list[tuple[Program, Configuration]]:
    """So many programs and ways to shard them over two ranks."""
    found: list[tuple[Program, Configuration]] = []

    @hypothesis.settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases(ranks=(2,), kinds=SINGLE, depth=2))
    def keep(case: tuple[Program, Configuration]) -> None:
        found.append(case)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep()
    return found


def run_drawn(group: Collectives, program: Program, configuration: Configuration) -> Any:
    """What one rank makes of the program: its losses and the like, its gradients and its parameters."""
    with thresholds_of(configuration):
        try:
            record = run_sharded(group, program, configuration)
        except NothingToReduceError:
            return "the program ends with gradients that nothing reduces"
    return [record.numbers, record.gradients, record.parameters, record.looks]
