"""Units that are one long parameter each, above every threshold, on the device."""

from __future__ import annotations

import itertools

import pytest

from flatparam_core import all_thresholds
from integration_tests.simulated.long_parameters import HIDDEN, WIDTH, Way, train
from integration_tests.simulated.twins import wrong_with

pytestmark = [pytest.mark.processes, pytest.mark.long]

WAYS = [
    *(Way(*each) for each in itertools.product(("", "bfloat16", "float16"), (False, True), (False, True))),
    Way(strategy="SHARD_GRAD_OP", lowers_thresholds=True),
    Way(use_orig_params=True, differentiates_inputs=True, lowers_thresholds=True),
    Way("bfloat16", use_orig_params=True, strategy="NO_SHARD"),
]


def test_long_parameters_have_the_bits_of_the_cpu() -> None:
    """Losses, gradients of inputs and parameters are the CPU's, bit for bit, in every precision, and nothing races."""
    assert wrong_with([(train, (way,)) for way in WAYS]) == {}


def test_they_are_above_the_thresholds() -> None:
    """The longest unit, and its shard on two ranks, are above each threshold that decides about them by their size."""
    full = WIDTH * HIDDEN
    for each in all_thresholds():
        others = ("comm.broadcast_bucket_nbytes", "runtime.matrix_bucket_numel")
        if each.name in others or each.name.startswith("state."):
            continue  # nothing is broadcast, stepped whole, or saved
        if each.name.endswith("_numel"):
            assert each.default < full // 2, each
        elif each.name.endswith("_nbytes"):
            assert each.default < 4 * full, each
