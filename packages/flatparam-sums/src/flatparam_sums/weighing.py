"""The weights of micro-batches: by them gradients are multiplied, and by their sum the sum is divided."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Final, final

import attrs
import torch

from flatparam_comm import Averaging, FlatParamHandle, Reducer
from flatparam_runtime import FlatParamError

_WIDE: Final = frozenset({torch.bfloat16, torch.float32, torch.float64})
"""The dtypes in whose range sums of gradients times weights stay."""

MOST: Final = 2.0**29
"""The weight that a micro-batch stays below if sums are exact: so is its product with a float32, of 24 bits, then."""


@final
@attrs.define(eq=False)
class Weighing:
    """The weights of a model's micro-batches since its last reduction, which divides by their sum.

    Sums in float16 have little room above the gradients: there a power of two near the first weight is taken out of
    each, and put back, over the mean weight of a rank, before the ranks' sums are added.
    """

    weight: float = 1.0
    """The weight of the micro-batch whose gradients are collected."""
    weights: list[float] = attrs.field(factory=list)
    """Those of this rank's micro-batches."""
    total: float | None = None
    """The sum over all ranks, once it is known."""
    unit: float = 0.0
    """The power of two near the first weight that is not 0; 0 if there was none."""
    is_on: bool = False
    """Whether the gradients to reduce are of micro-batches with weights, on this rank or others."""

    def begin(self, weight: float) -> None:
        """Begin a micro-batch of this weight."""
        self.weight, self.is_on = weight, True
        self.unit = self.unit or _power_of_two(weight)

    def end(self, total: float) -> None:
        """Have the next reduction divide by `total`, the sum of the weights of all ranks."""
        self.total, self.is_on = total, True

    def reset(self) -> None:
        """Forget everything: the gradients were reduced, or dropped."""
        self.weights.clear()
        self.weight, self.total, self.unit, self.is_on = 1.0, None, 0.0, False

    def of(self, mean: Averaging, reducer: Reducer, handles: Sequence[FlatParamHandle]) -> Averaging:
        """Return the factors of the weighted mean, from those of the plain one.

        Raises:
            FlatParamError: if a backward pass reduces that is in no micro-batch, while some wait for their reduction.
        """
        if not self.is_on:
            return mean
        if reducer.synchronises and self.total is None:
            raise FlatParamError(
                f"rank {reducer.topology.rank}: expected reduce_gradients() after the micro-batches of accumulate(), "
                "found a backward pass outside of it; call reduce_gradients() first, or zero_grad() to drop what was "
                "collected"
            )
        if reducer.sums is not None:
            return mean
        ranks = reducer.divide_factor or reducer.topology.data_parallel_size
        unit, divisor = 1.0, 1.0
        if not all(handle.gradients.dtype in _WIDE for handle in handles):
            unit, divisor = self.unit or 1.0, _power_of_two((self.total or ranks) / ranks)
        after = mean.after * (self.total or ranks) / ranks / divisor
        return attrs.evolve(mean, after=after, weight=self.weight / unit, scale=unit / divisor)


def told(weight: float, width: int) -> int:
    """Return what a rank tells of its micro-batches, in 8 bytes: the sum of their weights, and how wide its sums are.

    Args:
        weight: at least 0; a whole number below 2**50 if `width` is not 0.
        width: see `ExactSums.widen`.
    """
    if width:
        # No weight has the sign, and the messages of `following` are not so small.
        return ~((width << 50) + int(weight))
    return int(struct.unpack("<q", struct.pack("<d", weight + 0.0))[0])


def understood(value: int) -> tuple[float, int]:
    """Return the weight and the width of what `told` has made."""
    if value < 0:
        return float(~value & 2**50 - 1), ~value >> 50
    return float(struct.unpack("<d", struct.pack("<q", value))[0]), 0


def _power_of_two(value: float) -> float:
    """Return the largest power of two up to `value`; 0 for 0."""
    return math.ldexp(0.5, math.frexp(value)[1]) if value else 0.0
