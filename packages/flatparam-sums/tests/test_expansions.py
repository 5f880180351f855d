"""Exact sums: equal to those of fractions, whatever the order, rounded once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from each_row import each_row
from torch import Tensor

from flatparam_sums import expansions
from flatparam_sums.expansions import Expansion, add_exactly, exact_sum, root_of, rounded, sum_exactly
from flatparam_sums.weighing import MOST

BITS = {torch.float32: (24, -149), torch.bfloat16: (8, -133), torch.float16: (11, -24)}
"""Of each dtype, the bits of a number, and the exponent of the smallest."""


def nearest(value: Fraction, dtype: torch.dtype) -> float:
    """Round to nearest and even, in integers."""
    if not value:
        return 0.0
    bits, least = BITS[dtype]
    size = abs(value)
    unit = size.numerator.bit_length() - size.denominator.bit_length() - bits
    while size >= Fraction(2) ** (unit + bits):
        unit += 1
    unit = max(unit, least)
    units = size / Fraction(2) ** unit
    whole = round(units)  # half to even
    result = Fraction(whole) * Fraction(2) ** unit
    largest = Fraction(torch.finfo(dtype).max)
    return math.copysign(math.inf if result > largest else float(result), value)


def draw(seed: int, numel: int = 48) -> tuple[list[Tensor], list[int], int]:
    """Return rows of numbers of very different sizes that nearly cancel, their weights, and a divisor."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    spread, rows = drawn.choice([1, 10, 60, 140]), list[Tensor]()
    for _ in range(drawn.randint(1, 9)):
        row = torch.ldexp(torch.randn(numel), torch.randint(-spread, spread // 2 + 1, (numel,)))
        if rows and drawn.random() < 0.4:
            row = -rows[-1] * (1 + (torch.rand(numel) < 0.5).float() * 2**-22)
        rows.append(row)
    weights = [drawn.choice([0, 1, 3, 7, 1000, 99991, int(MOST) - 1]) for _ in rows]
    return rows, weights, drawn.choice([1, 2, 3, 7, 10, 4096, 299973])


@each_row("dtype", BITS, ids=str)
def test_sums_are_those_of_fractions(dtype: torch.dtype) -> None:
    """Over a divisor, too, and with subnormal and infinite results: each is rounded once, in any order."""
    grown = 0
    for seed in range(60):
        rows, weights, divisor = draw(seed)
        exact = [
            sum(
                (Fraction(float(row[at])) * weight for row, weight in zip(rows, weights, strict=True)),
                Fraction(0),
            )
            for at in range(len(rows[0]))
        ]
        wanted = [nearest(value / divisor, dtype) for value in exact]
        for order in (range(len(rows)), random.Random(seed).sample(range(len(rows)), len(rows))):
            total = Expansion()
            for at in order:
                add_exactly(total, rows[at], float(weights[at]))
            grown = max(grown, len(total))
            assert rounded(total, float(divisor), dtype).tolist() == wanted, seed
    assert grown > 1


@pytest.mark.parametrize("dtype", BITS)
def test_quotients_beside_the_middle_of_two_numbers(dtype: torch.dtype) -> None:
    """A sum of two or three float64s, whatever its divisor, is rounded to the side on which it lies; a tie to even."""
    chance, bits = random.Random(0), BITS[dtype][0]
    for _ in range(600):
        divisor = chance.choice([3.0, 1000.0, float(chance.randint(3, 2**31) | 1), 0.1, 2.0**36 + 1])
        middle = Fraction(2 * (chance.getrandbits(bits - 1) | 1 << bits - 1) + 1, 2 ** (bits + 1)) * Fraction(divisor)
        parts = [float(middle)]
        parts.append(float(middle - Fraction(parts[0])))
        if chance.random() < 0.3:
            parts[1] = math.nextafter(parts[1], chance.choice([-math.inf, math.inf]))
        parts.append(chance.choice([0.0, 1.0, -1.0]) * 2.0 ** -chance.randint(140, 149))
        total = [torch.tensor([part], dtype=torch.float64) for part in parts]
        wanted = nearest(sum(map(Fraction, parts)) / Fraction(divisor), dtype)
        assert rounded(total, divisor, dtype).item() == wanted, (parts, divisor)


def test_sums_are_those_of_fsum() -> None:
    """In float64, without a divisor, they are `math.fsum`'s."""
    for seed in range(40):
        rows, _, _ = draw(seed)
        total = Expansion()
        for row in rows:
            add_exactly(total, row)
        found = rounded(total, 1.0, torch.float64).tolist()
        assert found == [math.fsum(float(row[at]) for row in rows) for at in range(len(rows[0]))]


def test_what_is_not_finite_and_zeros() -> None:
    """Infinities and NaN are those of a sum in any order; a sum of zeros, of whatever sign, is +0."""
    inf, nan = math.inf, math.nan
    rows = [
        torch.tensor([inf, -inf, inf, nan, -0.0, 1e38, -1e-45]),
        torch.tensor([1, 1, -inf, 1, -0.0, -1e38, 1e-45]),
    ]
    for order in (rows, rows[::-1]):
        output = torch.empty(7)
        sum_exactly(order, [1.0, 1.0], 2.0, output)
        assert output.tolist()[:2] == [inf, -inf]
        assert output[2:4].isnan().all()
        assert output.tolist()[4:] == [0, 0, 0]
        assert not output[4:].signbit().any()


@each_row("numel", [0, 1, 2**15 - 1, 2**15, 2**15 + 1])
def test_blocks(numel: int) -> None:
    """Tensors longer than what is added at once are added whole, also if only a block needs one more tensor."""
    rows = [torch.ones(numel), torch.full((numel,), 2.0**-30)]
    if numel:
        rows[1][-1] = 2.0**-60
    output = torch.empty(numel)
    sum_exactly([*rows, -rows[0]], [1.0] * 3, 1.0, output)
    assert torch.equal(output, rows[1])
    total = Expansion()
    for row in (*rows, -rows[0]):
        add_exactly(total, row)
    assert len(total) == (2 if numel else 1)
    assert torch.equal(rounded(total, 1.0, torch.float32), rows[1])


def test_norms() -> None:
    """The sum over all elements is exact in any cut, and its root within a bit; what is not finite stays so."""
    for seed in range(30):
        torch.manual_seed(seed)
        least, most = random.Random(seed).choice([(-20, 5), (-500, 400), (-1060, 40)])
        values = torch.ldexp(torch.randn(700).double(), torch.randint(least, most, (700,)))
        found = exact_sum([values[:123], values[123:]])
        assert Fraction(int(found), 1 << 1074) == sum(map(Fraction, values.tolist()))
        squares = exact_sum([values.abs()])
        assert abs(root_of(squares) - math.sqrt(Fraction(int(squares), 1 << 1074))) <= math.ulp(root_of(squares))
    assert exact_sum([]) == 0 == root_of(0)
    assert math.isinf(exact_sum([torch.tensor([1.0, math.inf]).double()]))
    assert math.isnan(exact_sum([torch.tensor([1.0, math.nan]).double()]))


@each_row("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pairs(dtype: torch.dtype) -> None:
    """The short way for the mean of two is the long one's bits: subnormal numbers, overflow and zeros, too."""
    torch.manual_seed(0)
    numel = 2**15 + 77
    bits = torch.iinfo(torch.int32 if dtype == torch.float32 else torch.int16)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    rows = [torch.randint(bits.min, bits.max, (numel,), dtype=kind).view(dtype) for _ in range(2)]
    # Without them the first block stays finite, and takes the short way.
    for row in rows:
        row[: 2**15] = torch.where(row[: 2**15].abs() < 1, row[: 2**15], 0)
    rows[1][:100] = -rows[0][:100]
    short, long = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
    sum_exactly(rows, [1.0, 1.0], 2.0, short)
    sum_exactly([*rows, torch.zeros(numel, dtype=dtype)], [1.0] * 3, 2.0, long)
    assert torch.equal(short.nan_to_num(5.0), long.nan_to_num(5.0))
    assert torch.equal(short.isnan(), long.isnan())
    assert torch.equal(short.signbit() & ~short.isnan(), long.signbit() & ~long.isnan())


def test_the_host_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator is waited for once, however many blocks there are, as long as one float64 holds each sum."""
    read = list[str]()

    def counted(name: str) -> Callable[[Tensor], object]:
        original = getattr(Tensor, name)

        def call(tensor: Tensor) -> object:
            read.append(name)
            return original(tensor)

        return call

    for name in ("tolist", "__bool__", "__float__", "item"):
        monkeypatch.setattr(Tensor, name, counted(name))
    monkeypatch.setattr(expansions, "BLOCK", 16)
    rows, output = [torch.randn(100) for _ in range(4)], torch.empty(100)
    for count in (2, 3):
        read.clear()
        sum_exactly(rows[:count], [1.0] * count, 2.0, output)
        assert read == ["tolist"]
    rows[1][40] = rows[0][40] * 2.0**-60
    sum_exactly(rows[:3], [1.0] * 3, 2.0, output)
    assert "__bool__" in read, "the block with a number that is too small is added again"
    exact = sum(Fraction(float(row[40])) for row in rows[:3]) / 2
    assert float(output[40]) == nearest(exact, torch.float32)
