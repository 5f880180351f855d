"""The core of the zoo on real processes over gloo: beside torch FSDP1 in the same ranks, and beside the world of threads."""

from __future__ import annotations

import functools

import pytest
import torch

from flatparam_comm import Collectives, run_threads
from flatparam_comm.testing import run_processes
from integration_tests.parity import oracle_fsdp1
from integration_tests.parity.runs import Run, assert_same, assert_same_tensors, distance
from integration_tests.parity.sharded import RankRun, Setting, join, train
from integration_tests.parity.zoo import named

pytestmark = pytest.mark.processes

ULPS = 4.0

SETTINGS = (
    Setting("FULL_SHARD", False, "adamw", forward_prefetch=True),
    Setting("FULL_SHARD", True, "sgd", backward_prefetch="BACKWARD_POST"),
    Setting("SHARD_GRAD_OP", False, "sgd", backward_prefetch=None),
    Setting("SHARD_GRAD_OP", True, "adamw"),
)

SETTINGS_OF = {2: SETTINGS, 3: (SETTINGS[0], SETTINGS[3])}

NAMES = {
    2: (
        "frozen",
        "uneven",
        "nested",
        "by-step",
        "by-rank",
        "unused",
        "transformer",
        "recurrent",
        "checkpoint-in-unit",
        "reentrant-around-unit",
    ),
    3: ("frozen", "nested", "by-rank", "transformer"),
}

Plan = list[tuple[str, Setting, bool]]
"""The model, how it is wrapped, and whether torch trains it too."""


def plan(ranks: int, whole: bool) -> Plan:
    """Everything that one world trains in its one launch: each model in each setting, or in every other one.

    On three ranks there are two settings. With every other one, two models that follow each other have all.
    """
    return [
        (name, setting, setting.use_orig_params not in named(name).not_in_torch)
        for number, name in enumerate(NAMES[ranks])
        for setting in SETTINGS_OF[ranks][0 if whole else number % 2 :: 1 if whole else 2]
    ]


def train_all(group: Collectives, todo: Plan) -> list[tuple[RankRun, Run | None]]:
    """A rank's part: every model in every setting, ours and torch's in turn."""
    return [
        (train(group, name, setting), oracle_fsdp1.train(group, name, setting) if with_torch else None)
        for name, setting, with_torch in todo
    ]


@functools.cache
def gloo(ranks: int, whole: bool) -> list[tuple[str, Setting, Run, Run | None]]:
    """What the world of processes came to: the model, the setting, our run, and torch's where there is one."""
    todo = plan(ranks, whole)
    of_ranks = run_processes(ranks, train_all, todo)
    joined = []
    for (name, setting, _), results in zip(todo, zip(*of_ranks, strict=True), strict=True):
        ours = join([run for run, _ in results])
        theirs = [run for _, run in results if run is not None]
        joined.append((name, setting, ours, torch_run(theirs) if theirs else None))
    return joined


def torch_run(runs: list[Run]) -> Run:
    """One run out of the ranks' views of it, whose full parameters must agree."""
    for run in runs[1:]:
        assert_same_tensors(run.parameters[-1], runs[0].parameters[-1], "torch's ranks differ: parameter")
    losses = [[loss for (loss,) in of_ranks] for of_ranks in zip(*(run.losses for run in runs), strict=True)]
    return Run(losses, runs[0].gradients, runs[0].parameters)


def assert_same_training(ours: Run, theirs: Run, what: str) -> None:
    for step, (mine, other) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        assert all(map(torch.equal, mine, other)), f"{what}, step {step}: losses {mine}, torch's {other}"
        assert_same_tensors(ours.parameters[step], theirs.parameters[step], f"{what}, step {step}: parameter")


WORLDS = pytest.mark.parametrize(
    ("ranks", "whole"),
    [(2, False), *(pytest.param(*each, marks=pytest.mark.long) for each in ((3, False), (2, True), (3, True)))],
)


@WORLDS
def test_bits_of_torch(ranks: int, whole: bool) -> None:
    """5 steps have the bits of torch FSDP1's in the same ranks, on everything that torch trains to these numbers.

    What torch does not is written beside each model of the zoo. On two ranks any sum has the same bits. On three ranks we
    are within 4 ulps: gloo's reduce-scatter, which torch calls, adds the ranks' numbers in an order that depends on the
    place in the buffer, and ours adds them in the order of the ranks.
    """
    for name, setting, ours, theirs in gloo(ranks, whole):
        what = f"{name} {setting}"
        if theirs is None:
            assert named(name).not_in_torch[setting.use_orig_params]
        elif ranks == 3:
            for mine, other in zip(ours.parameters, theirs.parameters, strict=True):
                assert distance(mine, other) <= ULPS, what
        else:
            assert_same_training(ours, theirs, what)


@WORLDS
def test_bits_of_threads(ranks: int, whole: bool) -> None:
    """Processes over gloo and ranks in a world of threads get the same bits: losses, gradients, parameters.

    On three ranks too, since both add the ranks' numbers in the order of the ranks.
    """
    for name, setting, ours, _ in gloo(ranks, whole):
        assert_same(join(run_threads(ranks, train, name, setting)), ours)
