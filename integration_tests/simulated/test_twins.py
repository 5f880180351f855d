"""Tests of parity have twins here: what their ranks do, with tensors of the device, has the bits of the CPU."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from integration_tests.parity import test_accumulation, test_interruptions, test_switch
from integration_tests.parity.interruptions import OutOfLuck
from integration_tests.parity.programs import PROGRAMS
from integration_tests.parity.sharded import Setting, shard, train
from integration_tests.parity.test_processes import SETTINGS
from integration_tests.parity.zoo import ZOO
from integration_tests.simulated.twins import Job, wrong_with

pytestmark = pytest.mark.processes

STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP")


WITHOUT: Final = {"recurrent"}
"""An LSTM has a kernel of its own on each kind of device but the CPU, and so nothing that could have the CPU's bits."""


def _zoo() -> list[Job]:
    """Each model in two of the four settings, and every other one without the wrapper, by hooks alone."""
    jobs: list[Job] = []
    for number, name in enumerate(name for name in ZOO if name not in WITHOUT):
        jobs += [(train, (name, setting)) for setting in SETTINGS[number % 2 :: 2]]
        if number % 2:
            jobs.append((train, (name, SETTINGS[number % 4], shard)))
    return jobs


def _accumulation() -> list[Job]:
    """Every unusual step, wrapped and not."""
    jobs: list[Job] = []
    for number, (program, name) in enumerate(itertools.product(PROGRAMS, ("nested", "checkpoint-around-unit"))):
        setting = Setting(STRATEGIES[number % 2], bool(number % 3), "adamw", forward_prefetch=bool(number % 2))
        jobs.append((test_accumulation.sharded_run, (name, program, setting, bool(number % 4))))
    return jobs


def _interruptions() -> list[Job]:
    """Every place at which a step can fail; an interrupt from the keyboard in every other one."""
    return [
        (
            test_interruptions.interrupted_run,
            (
                place,
                (OutOfLuck, KeyboardInterrupt)[number % 2],
                Setting(STRATEGIES[number // 2 % 2], bool(number % 3), "adamw"),
                bool(number % 3),
            ),
        )
        for number, place in enumerate(test_interruptions.PLACES)
    ]


def _switch() -> list[Job]:
    ways = itertools.product(STRATEGIES, (False, True), (None, 0, 1))
    return [(test_switch.sharded_gradients, (Setting(s, original), on)) for s, original, on in ways]


JOBS: Final = {
    "the zoo": _zoo,
    "accumulation": _accumulation,
    "interruptions": _interruptions,
    "switch": _switch,
}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.long) if number else name for number, name in enumerate(JOBS)]
)
def test_what_ranks_do_has_the_bits_of_the_cpu(family: str) -> None:
    """Losses, gradients and parameters are those of the CPU, bit for bit, and nothing races."""
    assert wrong_with(JOBS[family]()) == {}
