"""The zoo in a world of threads, against one process that trains the unsharded model."""

from __future__ import annotations

import functools

import pytest

from flatparam_comm import run_threads
from integration_tests.parity import local
from integration_tests.parity.runs import Run, assert_same, distance
from integration_tests.parity.sharded import Setting, join, shard, train
from integration_tests.parity.zoo import CASES, ZOO

PREFETCH = {"sgd": (False, "BACKWARD_PRE"), "adamw": (True, "BACKWARD_POST")}
"""No number depends on prefetching, so one optimizer goes with one way of it."""

ULPS = 4.0

strategies = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
exposures = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
optimizers = pytest.mark.parametrize("optimizer", ["sgd", "adamw"])


@functools.cache
def sharded_run(name: str, ranks: int, strategy: str, original: bool, optimizer: str) -> Run:
    forward, backward = PREFETCH[optimizer]
    return join(run_threads(ranks, train, name, Setting(strategy, original, optimizer, forward, backward)))


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("ranks", [2, 3])
@strategies
@exposures
@optimizers
def test_bits_of_the_reduction_rule(
    name: str, ranks: int, strategy: str, original: bool, optimizer: str
) -> None:
    """5 steps have the bits of local gradients, one rank after the other, reduced as ((g0/2 + g1/2) + g2/2) / 1.5."""
    expected = local.reduced(name, ranks, optimizer, flat=not original)
    assert_same(sharded_run(name, ranks, strategy, original, optimizer), expected)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.used_once])
@strategies
@exposures
@optimizers
def test_bits_of_the_mean_of_two_losses(name: str, strategy: str, original: bool, optimizer: str) -> None:
    """5 steps on two ranks have the bits of one process that trains on the mean of the ranks' losses."""
    expected = local.mean_of_losses(name, 2, optimizer, flat=not original)
    assert_same(sharded_run(name, 2, strategy, original, optimizer), expected)


OFF_BY_ROUNDING = [
    (case.name, ranks) for case in CASES for ranks in (2, 3) if ranks == 3 or not case.used_once
]


@pytest.mark.parametrize(("name", "ranks"), OFF_BY_ROUNDING)
@exposures
@optimizers
def test_distance_to_the_mean_of_losses(name: str, ranks: int, original: bool, optimizer: str) -> None:
    """Where bits cannot be equal, the first gradients and all parameters are within 4 ulps of the model's largest element.

    They cannot be for two reasons. Three ranks: the graph of the mean divides the losses by 3, which rounds, and carries
    the rounded factor through the backward pass, while ranks divide their gradients by 2 (exactly), and the sum by 1.5.
    A parameter that is used k times by each rank: the graph of the mean adds ranks * k contributions one by one, in the
    order of the whole graph, while each rank adds its own k first. Either is a handful of roundings of half an ulp in
    each sum, and a sum can be much smaller than its summands: so the ulp is that of the largest element.
    Only the first gradients are compared, because the later ones are those of other parameters.
    """
    found = sharded_run(name, ranks, "FULL_SHARD", original, optimizer)
    expected = local.mean_of_losses(name, ranks, optimizer, flat=not original)
    assert distance(found.gradients[0], expected.gradients[0]) <= ULPS
    for mine, theirs in zip(found.parameters, expected.parameters, strict=True):
        assert distance(mine, theirs) <= ULPS


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(("strategy", "original"), [("FULL_SHARD", False), ("SHARD_GRAD_OP", True)])
def test_bits_without_the_wrapper(name: str, strategy: str, original: bool) -> None:
    """A module that is sharded in place, by hooks alone, trains to the bits of the wrapped one."""
    setting = Setting(strategy, original, "sgd", *PREFETCH["sgd"])
    found = join(run_threads(2, train, name, setting, shard))
    assert_same(found, sharded_run(name, 2, strategy, original, "sgd"))


@pytest.mark.parametrize("name", ["nested", "by-rank", "twice", "reentrant-around-unit", "dtypes"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_bits_do_not_depend_on_when_bytes_arrive(name: str, strategy: str) -> None:
    """Results that are delivered as early as an engine can give the same bits as those that wait() delivers."""
    forward, backward = PREFETCH["adamw"]
    setting = Setting(strategy, False, "adamw", forward, backward)
    early = join(run_threads(2, train, name, setting, deliver_late=False))
    assert_same(early, sharded_run(name, 2, strategy, False, "adamw"))
