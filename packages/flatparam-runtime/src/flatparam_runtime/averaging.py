"""How a mean over ranks is divided into a factor before and one after the sum."""

from __future__ import annotations

__all__ = ["gradient_divisors", "split_divisor"]


def gradient_divisors(ranks: int) -> tuple[float, float]:
    """The factors by which gradients are divided before and after the sum over `ranks`.

    The first is a power of two near the square root of `ranks`, so that neither the summands nor the sum
    leave the range of a 16-bit dtype; their product is `ranks`. The rule is FSDP1's, so that the rounding is
    the same. In a dtype with the range of fp32 both may be done after the sum: to divide by a power of two before it
    changes no bit.
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
