"""Exact sums of floating-point numbers, element by element, rounded once.

A sum is kept as an expansion: float64 tensors whose exact sum it is. To add a number to each tensor in turn, with the
error of each addition going on to the next, loses nothing (J. R. Shewchuk, "Adaptive Precision Floating-Point
Arithmetic and Fast Robust Geometric Predicates", Discrete Comput. Geom. 18 (1997), grow-expansion). Of numbers in
float32 whose magnitudes are within some nine decimal digits of each other, one tensor holds the whole sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

Expansion: TypeAlias = list[Tensor]
"""1-D tensors of float64, of one length: the exact sum, element by element."""

BLOCK: Final = 2**15
"""Elements that a CPU adds at once, so that what is in between stays in a core's cache."""
DEVICE_BLOCK: Final = 2**23
"""Elements that an accelerator adds at once."""
_SPLIT: Final = 2.0**27 + 1
"""T. J. Dekker's constant, which cuts a float64 into two halves."""


def block_of(tensor: Tensor) -> int:
    """Return how many elements of this tensor are added at once."""
    return BLOCK if tensor.device.type == "cpu" else DEVICE_BLOCK


def add_exactly(total: Expansion, numbers: Tensor, factor: float = 1.0) -> None:
    """Add `factor * numbers` to the expansion, which grows by a tensor if it cannot hold the sum otherwise.

    Args:
        total: empty for 0.
        numbers: 1-D, of any floating dtype. The product is exact if both together have at most 53 bits.
        factor: the weight of the numbers.
    """
    if not total:
        total.append(_times(numbers, factor))
        return
    size = block_of(numbers)
    for start in range(0, numbers.numel(), size):
        block = slice(start, start + size)
        carried = _times(numbers[block], factor)
        first = total[0][block]
        added = first + carried
        if bool(_kept(first, carried, added).all()):
            first.copy_(added)
            continue
        for tensor in total:
            carried = _two_sum(tensor[block], carried)
            if not carried.any():
                break
        else:
            grown = torch.zeros(numbers.numel(), dtype=torch.float64, device=numbers.device)
            grown[block] = carried
            total.append(grown)


def sum_exactly(rows: Sequence[Tensor], factors: Sequence[float], divisor: float, output: Tensor) -> None:
    """Fill `output` with the exact sum of the rows times their factors, over `divisor`, rounded once.

    Each block is added in one float64 first. Whether that has lost anything is read once for all blocks, since an
    accelerator is waited for each time; blocks that have lost something are added again, as expansions.

    Args:
        rows: 1-D, of any floating dtypes, as long as `output`, in other memory.
    """
    # The sum of two numbers is rounded once by the processor; halving loses nothing then, not even of subnormals.
    is_pair = len(rows) == 2 and {*factors} == {1.0} and divisor == 2.0 and rows[0].dtype == output.dtype
    size = block_of(output)
    blocks = [slice(start, start + size) for start in range(0, output.numel(), size)]
    exact = list[Tensor]()
    for block in blocks:
        parts, result = [row[block] for row in rows], output[block]
        if is_pair:
            torch.add(*parts, out=result).mul_(0.5).add_(0.0)
            # The sum of large numbers may be infinite where its half is not.
            exact.append(result.sum().isfinite())
        else:
            total, is_kept = _plain_sum(parts, factors)
            result.copy_(rounded([total], divisor, output.dtype))
            exact.append(is_kept)
    for block, is_exact in zip(blocks, torch.stack(exact).tolist() if exact else (), strict=True):
        if not is_exact:
            expansion = Expansion()
            for row, factor in zip(rows, factors, strict=True):
                add_exactly(expansion, row[block], factor)
            output[block].copy_(rounded(expansion, divisor, output.dtype))


def _plain_sum(rows: Sequence[Tensor], factors: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the sum in one float64, and whether that has lost nothing: one bool, on the device."""
    total = _times(rows[0], factors[0])
    kept = torch.ones((), dtype=torch.bool, device=total.device)
    for row, factor in zip(rows[1:], factors[1:], strict=True):
        number = _times(row, factor)
        added = total + number
        kept = _kept(total, number, added).logical_and_(kept)
        total = added
    return total, kept.all()


def _times(numbers: Tensor, factor: float) -> Tensor:
    """Return the product in float64, a tensor of its own."""
    return numbers.to(torch.float64, copy=True) if factor == 1.0 else numbers.double() * factor


def _kept(first: Tensor, second: Tensor, added: Tensor) -> Tensor:
    """Return of which elements the sum `added` has lost nothing.

    Whichever of two numbers is the larger one, to subtract it from their sum is exact (T. J. Dekker).
    """
    return torch.eq(added - first, second).logical_and_(torch.eq(added - second, first))


def _two_sum(total: Tensor, number: Tensor) -> Tensor:
    """Add `number` to `total` in place; returns each error, 0 if the sum is not finite (D. E. Knuth)."""
    added = total + number
    virtual = added - total
    error = (total - (added - virtual)).add_(number.sub_(virtual))
    total.copy_(added)
    return error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def rounded(total: Expansion, divisor: float, dtype: torch.dtype) -> Tensor:
    """Return the exact sum over `divisor`, rounded once, to nearest and to even; a sum of 0 is +0.

    Args:
        total: at least one tensor; its tensors are overwritten.
        divisor: above 0.
        dtype: float64 is rounded once if `divisor` is a power of two, and else by one more rounding.
    """
    whole, *tails = _distilled(total) if len(total) > 1 else total
    quotient = whole if divisor == 1.0 else whole / divisor
    if dtype != torch.float64:
        is_exact = math.frexp(divisor)[0] == 0.5
        rest = torch.zeros_like(whole) if is_exact else _remainder(whole, quotient, divisor)
        if tails and not is_exact:
            # With what the first float64 leaves, the one beside the quotient may be nearer.
            nearest = quotient + (rest + tails[0]) / divisor
            rest, quotient = rest - (nearest - quotient) * divisor, nearest
        for tail in tails:
            rest = rest + tail
        if tails or not is_exact:
            quotient = _to_odd(quotient, rest.sign())
        if dtype not in (torch.float32, torch.float64):
            # torch converts to the narrow dtypes by float32: it must not round to nearest twice.
            narrow = quotient.float()
            quotient = _to_odd(narrow, (quotient - narrow.double()).nan_to_num(0.0, 0.0, 0.0).sign())
    return quotient.to(dtype) + 0.0


def _distilled(total: Expansion) -> Expansion:
    """Return the sum as its float64, what that leaves as its own, and so on."""
    while True:
        before = [tensor.clone() for tensor in total]
        for last in range(len(total) - 1, 0, -1):
            total[last] = _two_sum(total[last - 1], total[last])
        if all(torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0)) for a, b in zip(before, total, strict=True)):
            break
    return total


def _remainder(whole: Tensor, quotient: Tensor, divisor: float) -> Tensor:
    """Return `whole - quotient * divisor`, which is a float64."""
    scaled = quotient * divisor
    large = quotient * _SPLIT
    high = large - (large - quotient)
    low = quotient - high
    split = divisor * _SPLIT
    above = split - (split - divisor)
    below = divisor - above
    error = ((high * above - scaled) + high * below + low * above) + low * below
    return ((whole - scaled) - error).nan_to_num_(0.0, 0.0, 0.0)


def _to_odd(value: Tensor, sign: Tensor) -> Tensor:
    """Round to odd: have the last bit say that something was left, on the side `sign` (S. Boldo, G. Melquiond, 2008).

    Rounding the result to fewer bits is then the one rounding of the exact value.
    """
    kind = torch.int64 if value.dtype == torch.float64 else torch.int32
    bits = value.view(kind)
    is_even = (bits & 1 == 0) & (sign != 0) & value.isfinite()
    outwards = torch.where(value == 0, 1, torch.where((value > 0) == (sign > 0), 1, -1)).to(kind)
    moved = (bits + outwards).view(value.dtype)
    moved = torch.where(value == 0, moved.abs().copysign(sign.to(value.dtype)), moved)
    return torch.where(is_even, moved, value)


# Norms


_GRID: Final = 40
"""Bits of a number that one pass takes: so many, and those of a count of elements, are an int64."""
_MOST: Final = 2**22
"""Elements whose parts are added as one int64."""


def exact_sum(numbers: Iterable[Tensor]) -> int | float:
    """Return the exact sum of all elements, of float64, as a multiple of 2**-1074; not finite if an element is not."""
    total = 0
    for tensor in numbers:
        for start in range(0, tensor.numel(), _MOST):
            part = _sum_of_block(tensor[start : start + _MOST].clone())
            if isinstance(part, float):
                return part
            total += part
    return total


def _sum_of_block(left: Tensor) -> int | float:
    total = 0
    largest = float(left.abs().max()) if left.numel() else 0.0
    if not math.isfinite(largest):
        return float(left.sum())
    while largest:
        unit = math.frexp(largest)[1] - _GRID
        if unit < -1074 + 52:
            # Near the smallest numbers all that is left are small multiples of the smallest.
            return total + sum(int(math.ldexp(each, 537) * 2.0**537) for each in left.tolist())
        # Dividing by a power of two is exact, and so are rounding, and subtracting what was rounded.
        units = _times_power(left, -unit).round_()
        total += int(units.to(torch.int64).sum()) << (unit + 1074)
        left -= _times_power(units, unit)
        largest = float(left.abs().max())
    return total


def _times_power(numbers: Tensor, exponent: int) -> Tensor:
    """Return `numbers * 2**exponent`, of which the factor may be no float64; `torch.ldexp` refuses that on CUDA."""
    half = exponent // 2
    return (numbers * 2.0**half).mul_(2.0 ** (exponent - half))


def root_of(total: int | float) -> float:
    """Return the square root of a sum of `exact_sum`, to nearest within a float64's last bit."""
    if isinstance(total, float):
        return total
    shift = max(0, total.bit_length() - 128) & ~1
    return math.ldexp(math.isqrt(total >> shift), shift // 2 - 537)
