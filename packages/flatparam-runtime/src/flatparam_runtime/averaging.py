"""How a mean over ranks is divided into a factor before and one after the sum."""

from __future__ import annotations

__all__ = ["gradient_divisors"]


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
