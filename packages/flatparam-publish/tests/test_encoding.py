"""The bytes of changes: they come back as they were, they are as many as the formula says, and damage is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor

from flatparam_publish import PublishError
from flatparam_publish.encoding import HEADER_NBYTES, bits_of, changes, read_records, values

DTYPES = [
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def skips(positions: list[int]) -> int:
    """How many bytes of 255 stand between the gaps of increasing positions, one by one."""
    return sum((position - before - 1) // 255 for before, position in zip([-1, *positions], positions, strict=False))


def formula(positions: list[int], exceptions: list[int], itemsize: int) -> int:
    """The bytes of a record of changes. `exceptions` are those among the changed whose integer did not move by one."""
    return (
        HEADER_NBYTES
        + len(positions)
        + skips(positions)
        + -(-len(positions) // 8)
        + len(exceptions) * (1 + itemsize)
        + skips(exceptions)
    )


def record_of(pieces: list[Tensor], itemsize: int) -> tuple[Any, int]:
    data = torch.cat(pieces)
    (record,) = read_records(data, [0, itemsize])
    return record, data.numel()


@each_row("dtype", DTYPES, ids=str)
def test_changes_come_back(dtype: torch.dtype) -> None:
    """Whichever elements changed, and however, the receiver gets exactly their new bits, in the bytes of the formula."""
    chosen = random.Random(3)
    for numel, share in [(1, 1.0), (7, 0.5), (600, 0.001), (600, 0.3), (70_000, 0.0002), (5_000, 0.999)]:
        old = bits_of(torch.randint(0, 100, (numel,), generator=torch.Generator().manual_seed(numel)).to(dtype))
        positions = sorted(chosen.sample(range(numel), max(1, int(share * numel))))
        by = [chosen.choice([1, 1, 1, -1, -1, 17]) for _ in positions]
        where = torch.tensor(positions)
        new = old.clone()
        new[where] += torch.tensor(by).to(old.dtype)
        record, nbytes = record_of(changes(1, 5, where, old[where], new[where]), old.itemsize)
        whole = torch.cat([old.new_full((5,), 3), old])
        found_at, found = record.new_values(whole)
        assert found_at.tolist() == [5 + position for position in positions]
        assert torch.equal(found, new[where])
        exceptions = [number for number, step in enumerate(by) if step == 17]
        assert nbytes == formula(positions, exceptions, old.itemsize)


def test_values_come_back() -> None:
    """A record of values has a header and the values."""
    bits = bits_of(torch.randn(9).bfloat16())
    record, nbytes = record_of(values(1, 4, bits), 2)
    assert nbytes == HEADER_NBYTES + 18
    positions, found = record.new_values(torch.zeros(13, dtype=torch.int16))
    assert positions is None
    assert record.start == 4
    assert torch.equal(found, bits)


def test_damage_is_refused() -> None:
    """Records that end early, contradict themselves, or are about what the tensor lacks, are refused by name."""
    old = torch.zeros(50, dtype=torch.int16)
    where = torch.tensor([3, 40])
    data = torch.cat(changes(1, 0, where, old[where], old[where] + torch.tensor([1, 9], dtype=torch.int16)))
    for cut in (1, HEADER_NBYTES - 1, HEADER_NBYTES + 1, data.numel() - 1):
        with pytest.raises(PublishError, match="ends inside a record"):
            list(read_records(data[:cut], [0, 2]))
    with pytest.raises(PublishError, match="about tensor 1"):
        list(read_records(data, [2]))
    (record,) = read_records(data, [0, 2])
    with pytest.raises(PublishError, match=r"elements \[0, 41\) of tensor 1, which has 40"):
        record.new_values(old[:40])
    data[HEADER_NBYTES] = 255
    (record,) = read_records(data, [0, 2])
    with pytest.raises(PublishError, match="contradicts itself"):
        record.new_values(old)
