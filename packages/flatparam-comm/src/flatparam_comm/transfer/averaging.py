"""How a mean over ranks is divided into a factor before and one after the sum."""

from __future__ import annotations

import functools
import math
from typing import Final, final

import attrs
import torch

__all__ = ["Averaging", "averaging_over", "gradient_divisors", "split_divisor"]

_WIDE: Final = frozenset({torch.bfloat16, torch.float32, torch.float64})
"""Sums of gradients stay in their range without a division before."""


@final
@attrs.frozen
class Averaging:
    """How a sum over ranks becomes a mean: whatever is done where, the bits are FSDP1's."""

    before: float = 1.0
    """What gradients are divided by when they are collected."""
    factor: float = 1.0
    """What they are multiplied by in the collective that sums them."""
    after: float = 1.0
    """What the sum is divided by."""


@functools.cache
def averaging_over(
    ranks: int,
    divisor: float,
    dtypes: frozenset[torch.dtype],
    *,
    premultiplies: bool = False,
    copies: bool = True,
) -> Averaging:
    """How a sum over `ranks` is divided by `divisor`.

    A power of two costs no bit, so it is taken where it costs least: in the collective if that multiplies, else
    together with the rest after the sum, which is of a shard alone. Only in float16 a part has to come before it.

    Args:
        dtypes: what is summed.
        premultiplies: whether the collective can multiply.
        copies: whether gradients are copied before they are summed, with which a division costs nothing.
    """
    before, after = split_divisor(divisor, ranks)
    if not dtypes <= _WIDE:
        return Averaging(before=before, after=after)
    if premultiplies:
        if math.frexp(divisor)[0] == 0.5:
            return Averaging(factor=1.0 / divisor)
        return Averaging(factor=1.0 / before, after=after)
    return Averaging(before=before) if after == 1.0 and copies else Averaging(after=divisor)


def gradient_divisors(ranks: int) -> tuple[float, float]:
    """The factors by which gradients are divided before and after the sum over `ranks`.

    The first is a power of two near the square root of `ranks`, so that neither the summands nor the sum
    leave the range of a 16-bit dtype; their product is `ranks`. The rule is FSDP1's, so that the rounding is
    the same.
    """
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return float(before), ranks / before


def split_divisor(factor: float, ranks: int) -> tuple[float, float]:
    """The factors before and after the sum whose product is `factor`, a user's own divisor.

    What is divided before is never more than for a mean over `ranks`, and a power of two, so that it costs no bits.
    """
    before, _ = gradient_divisors(ranks)
    return before, factor / before
