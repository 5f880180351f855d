"""The division of a mean over ranks into a factor before the sum and one after it."""

from __future__ import annotations

import functools
from typing import Final, final

import attrs
import torch

_WIDE: Final = frozenset({torch.bfloat16, torch.float32, torch.float64})
"""The dtypes in whose range sums of gradients stay without a division before the sum."""


@final
@attrs.frozen
class Averaging:
    """The factors that turn a sum over ranks into a mean; whichever are used, the bits are those of FSDP1."""

    before: float = 1.0
    """The divisor of gradients when they are collected."""
    after: float = 1.0
    """The divisor of the sum."""
    in_parts: bool = False
    """Whether gradients are summed from where autograd leaves them, without a flat buffer."""


@functools.cache
def averaging_over(
    ranks: int,
    divisor: float,
    dtypes: frozenset[torch.dtype],
    *,
    in_copy: bool = True,
    in_parts: bool = False,
) -> Averaging:
    """Return the factors that divide a sum over `ranks` by `divisor`.

    Dividing by a power of two loses no bit, so it happens where it costs least: in the copy of gradients to the flat
    buffer if that is enough, else after the sum, which is only a shard. Only float16 needs a part of it before the sum.
    No collective is asked to divide or to multiply: plain sums are what every backend has, and NVLink's switches.

    Args:
        dtypes: the dtypes of the sums.
        in_copy: whether a division costs nothing in the copy, as on a CPU; on an accelerator it is a kernel of its own.
        in_parts: whether gradients are summed without being copied first.
    """
    before, after = split_divisor(divisor, ranks)
    if not dtypes <= _WIDE:
        return Averaging(before=before, after=after, in_parts=in_parts)
    if after == 1.0 and in_copy and not in_parts:
        return Averaging(before=before)
    return Averaging(after=divisor, in_parts=in_parts)


def gradient_divisors(ranks: int) -> tuple[float, float]:
    """Return the factors by which gradients are divided before and after the sum over `ranks`.

    The first is a power of two near the square root of `ranks`, so that neither the summands nor the sum leaves the
    range of a 16-bit dtype; the product of both is `ranks`. The rule is FSDP1's, so that the rounding is the same.
    """
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return float(before), ranks / before


def split_divisor(factor: float, ranks: int) -> tuple[float, float]:
    """Return the factors before and after the sum whose product is `factor`, a user's own divisor.

    The first factor is that of a mean over `ranks`, a power of two, so that it loses no bits.
    """
    before, _ = gradient_divisors(ranks)
    return before, factor / before
