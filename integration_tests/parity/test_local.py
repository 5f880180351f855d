"""The zoo in a world of threads, against one process that trains the unsharded model."""

from __future__ import annotations

import functools
import itertools

import pytest

from flatparam_comm import run_threads
from integration_tests.parity import local
from integration_tests.parity.runs import Run, assert_same, distance
from integration_tests.parity.sharded import Setting, join, shard, train
from integration_tests.parity.zoo import ZOO, named

PREFETCH = {"sgd": (False, "BACKWARD_PRE"), "adamw": (True, "BACKWARD_POST")}
"""No number depends on prefetching, so one optimizer goes with one way of it."""

ULPS = 4.0

Way = tuple[str, int, str, bool, str]
"""Model, ranks, strategy, use_orig_params, optimizer."""

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
EVERY_WAY = ("tied", "frozen", "uneven", "nested", "by-rank", "twice", "unused", "transformer")
FOUR_WAYS = (
    (2, "FULL_SHARD", False, "sgd"),
    (2, "SHARD_GRAD_OP", True, "adamw"),
    (3, "FULL_SHARD", True, "adamw"),
    (3, "SHARD_GRAD_OP", False, "sgd"),
)
"""For the rest of the zoo: each choice comes up with each other one, but not with each pair of them."""

IN_FULL = ("nested",)
"""Of those that are trained every way, the ones whose every way is short; of each other, four are, with each pair."""

WAYS: list[Way] = [
    (name, *way)
    for name in ZOO
    for way in (
        itertools.product((2, 3), STRATEGIES, (False, True), ("sgd", "adamw")) if name in EVERY_WAY else FOUR_WAYS
    )
]


def ways(*, equal_bits: bool) -> list[Way]:
    """Those in which the bits of the mean of the losses can be demanded, or those in which they cannot."""
    return [way for way in WAYS if (way[1] == 2 and named(way[0]).used_once) is equal_bits]


def words(value: object) -> str | None:
    """How a part of a way is shown in the name of a test."""
    return {True: "original", False: "flat"}[value] if isinstance(value, bool) else None


def over(chosen: list[Way]) -> pytest.MarkDecorator:
    cases = [
        way if way[1:] in FOUR_WAYS or way[0] in IN_FULL else pytest.param(*way, marks=pytest.mark.long)
        for way in chosen
    ]
    return pytest.mark.parametrize(("name", "ranks", "strategy", "original", "optimizer"), cases, ids=words)


@functools.cache
def sharded_run(name: str, ranks: int, strategy: str, original: bool, optimizer: str) -> Run:
    setting = Setting(strategy, original, optimizer, *PREFETCH[optimizer])
    return join(run_threads(ranks, train, name, setting))


@over(WAYS)
def test_bits_of_the_reduction_rule(name: str, ranks: int, strategy: str, original: bool, optimizer: str) -> None:
    """5 steps have the bits of local gradients, one rank after the other, reduced as ((g0/2 + g1/2) + g2/2) / 1.5."""
    expected = local.reduced(name, ranks, optimizer, flat=not original)
    assert_same(sharded_run(name, ranks, strategy, original, optimizer), expected)


@over(ways(equal_bits=True))
def test_bits_of_the_mean_of_two_losses(name: str, ranks: int, strategy: str, original: bool, optimizer: str) -> None:
    """5 steps on two ranks have the bits of one process that trains on the mean of the ranks' losses."""
    expected = local.mean_of_losses(name, ranks, optimizer, flat=not original)
    assert_same(sharded_run(name, ranks, strategy, original, optimizer), expected)


@over(ways(equal_bits=False))
def test_distance_to_the_mean_of_losses(name: str, ranks: int, strategy: str, original: bool, optimizer: str) -> None:
    """Where bits cannot be equal, the first gradients and all parameters are within 4 ulps of the model's largest element.

    They cannot be for two reasons. Three ranks: the graph of the mean divides the losses by 3, which rounds, and carries
    the rounded factor through the backward pass, while ranks divide their gradients by 2 (exactly), and the sum by 1.5.
    A parameter that is used k times by each rank: the graph of the mean adds ranks * k contributions one by one, in the
    order of the whole graph, while each rank adds its own k first. Either is a handful of roundings of half an ulp in
    each sum, and a sum can be much smaller than its summands: so the ulp is that of the largest element.
    Only the first gradients are compared, because the later ones are those of other parameters.
    """
    found = sharded_run(name, ranks, strategy, original, optimizer)
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
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bits_do_not_depend_on_when_bytes_arrive(name: str, strategy: str) -> None:
    """Results that are delivered as early as an engine can give the same bits as those that wait() delivers."""
    setting = Setting(strategy, False, "adamw", *PREFETCH["adamw"])
    early = join(run_threads(2, train, name, setting, deliver_late=False))
    assert_same(early, sharded_run(name, 2, strategy, False, "adamw"))
