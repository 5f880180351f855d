"""The two factors by which a sum over ranks becomes a mean."""

from __future__ import annotations

import math

import torch
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st

from flatparam_comm import gradient_divisors
from flatparam_comm.transfer.reduction import averaging_over

RANKS = st.integers(min_value=1, max_value=1 << 20)


@given(RANKS)
def test_the_product_is_the_number_of_ranks(ranks: int) -> None:
    """The divisions before and after the sum divide by the number of ranks, exactly."""
    before, after = gradient_divisors(ranks)
    assert before * after == ranks


@given(RANKS)
def test_the_first_is_a_power_of_two(ranks: int) -> None:
    """The first factor is a power of two, so that it rounds nothing; and at least one."""
    before, _ = gradient_divisors(ranks)
    assert before >= 1
    assert math.frexp(before)[0] == 0.5


def rule_of_the_specification(ranks: int) -> int:
    """Row S-034: start at one, and double as long as it divides ``ranks`` and is smaller than what is left."""
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return factor


@each_row(
    ("ranks", "factors"),
    [
        (1, (1, 1)),
        (2, (2, 1)),
        (3, (2, 1.5)),
        (4, (2, 2)),
        (6, (4, 1.5)),
        (8, (4, 2)),
        (12, (4, 3)),
        (16, (4, 4)),
        (64, (8, 8)),
        (1000, (16, 62.5)),
    ],
)
def test_the_rule(ranks: int, factors: tuple[float, float]) -> None:
    """The factors are FSDP1's, worked out by hand here."""
    assert gradient_divisors(ranks) == factors
    assert rule_of_the_specification(ranks) == factors[0]


@given(RANKS)
def test_neither_factor_leaves_the_range(ranks: int) -> None:
    """The first factor is at most twice the square root of the ranks, so no summand underflows before the sum."""
    before, after = gradient_divisors(ranks)
    assert before <= 2 * math.sqrt(ranks)
    assert after <= ranks


WIDE = frozenset({torch.float32, torch.bfloat16})


@given(
    RANKS,
    st.sampled_from([1.0, 0.25, 4.0, 3.0]),
    st.booleans(),
    st.sampled_from([WIDE, frozenset({torch.float16}), WIDE | {torch.float16}]),
)
def test_where_a_mean_is_divided(ranks: int, times: float, in_copy: bool, dtypes: frozenset[torch.dtype]) -> None:
    """Both divisions together are by the divisor, and the first is by a power of two; wide dtypes need one."""
    averaging = averaging_over(ranks, ranks * times, dtypes, in_copy=in_copy)
    assert averaging.before * averaging.after == ranks * times
    assert math.frexp(averaging.before)[0] == 0.5
    if dtypes == WIDE:
        assert 1.0 in (averaging.before, averaging.after)
        assert in_copy or averaging.before == 1.0


@each_row(
    ("ranks", "in_copy", "dtype", "expected"),
    [
        (1, False, torch.float32, (1, 1)),
        # In the copy, which has to read and write every element anyway.
        (2, True, torch.float32, (2, 1)),
        # Of the shard.
        (2, False, torch.bfloat16, (1, 2)),
        (8, True, torch.float32, (1, 8)),
        (3, True, torch.bfloat16, (1, 3)),
        (6, False, torch.float32, (1, 6)),
        # The range of float16 is too small for the sum.
        (8, False, torch.float16, (4, 2)),
        (8, True, torch.float16, (4, 2)),
    ],
)
def test_the_places_of_divisions(ranks: int, in_copy: bool, dtype: torch.dtype, expected: tuple[float, float]) -> None:
    """There is one division if one is enough: in the copy of the gradients, or of the shard."""
    found = averaging_over(ranks, float(ranks), frozenset({dtype}), in_copy=in_copy)
    assert (found.before, found.after) == expected
