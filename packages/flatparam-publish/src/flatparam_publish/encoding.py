"""The bytes of what is published: records of values, or of changes to values that the receiver has.

A record is a header of 32 bytes and a body. It is about elements `[start, ...)` of one tensor, in memory order, as the
integers that their bits are. A body of values has all of them. A body of changes has

    the gap before each changed element, one byte each, and a byte of 255 for each 255 elements that are skipped before
    a bit for each changed element: whether the integer grew by one, or shrank by one
    for each changed element that did something else: the gap before it among the changed ones, in the same way
    the new integers of these

In bfloat16, at the learning rates of fine-tuning, nearly every element that changes goes to a neighbouring number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, final

import attrs
import torch
from torch import Tensor

from flatparam_files.disk.system import bytes_view
from flatparam_publish.publish_error import PublishError

_HEADER: Final = struct.Struct("<IB3xQ4I")
HEADER_NBYTES: Final = _HEADER.size
"""The bytes of a record's header: index of the tensor, kind, start, and four lengths."""
_VALUES, _CHANGES = 0, 1
_SKIP: Final = 255
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """Return the elements of a 1-D, contiguous tensor as integers; a view."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def values(index: int, start: int, bits: Tensor) -> list[Tensor]:
    """The record that elements `[start, start + bits.numel())` of tensor `index` are `bits`: 1-D bytes, in pieces."""
    return [_header(index, _VALUES, start, bits.numel()), bytes_view(bits)]


def changes(index: int, start: int, positions: Tensor, old: Tensor, new: Tensor) -> list[Tensor]:
    """Return the record that some elements of tensor `index` have changed.

    Args:
        index: the place of the tensor in the catalogue.
        start: the element from which `positions` count.
        positions: 1-D, int64, at least one, increasing.
        old: the integers that are there, one for each position.
        new: the integers that are to be there; none equals the old one.

    Returns:
        1-D bytes, in pieces. With c positions p and e of them whose integer changed by something else than one, these
        are 32 + skips(p) + c + ceil(c / 8) + skips(e) + e * (1 + itemsize). There is a skip for each 255 elements of
        a gap.
    """
    difference = new - old
    grew = difference == 1
    others = (~(grew | (difference == -1))).nonzero().view(-1)
    gaps, of_others = _gaps(positions), _gaps(others)
    lengths = (positions.numel(), gaps.numel(), others.numel(), of_others.numel())
    return [_header(index, _CHANGES, start, *lengths), gaps, _packed(grew), of_others, bytes_view(new[others])]


def _header(index: int, kind: int, start: int, *lengths: int) -> Tensor:
    data = _HEADER.pack(index, kind, start, *(*lengths, 0, 0, 0, 0)[:4])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _gaps(positions: Tensor) -> Tensor:
    """For each of the increasing `positions` how many elements lie between it and the one before it, as bytes."""
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    skips = torch.div(gaps, _SKIP, rounding_mode="floor")
    ends = torch.cumsum(skips + 1, 0) - 1
    entries = positions.new_full((int(ends[-1]) + 1 if ends.numel() else 0,), _SKIP, dtype=torch.uint8)
    entries[ends] = (gaps - skips * _SKIP).to(torch.uint8)
    return entries


def _positions(entries: Tensor) -> Tensor:
    """Return the positions that `_gaps` gave these bytes for."""
    is_element = entries != _SKIP
    ends = torch.cumsum(entries.to(torch.int64) + is_element, 0)
    return ends[is_element] - 1


def _packed(flags: Tensor) -> Tensor:
    """Eight flags in a byte, the first in its lowest bit."""
    padded = flags.new_zeros(-(-flags.numel() // 8) * 8, dtype=torch.uint8)
    padded[: flags.numel()] = flags
    return (padded.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor, numel: int) -> Tensor:
    flags = (packed.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return flags.view(-1)[:numel].bool()


@final
@attrs.frozen(eq=False)
class Record:
    """A record that was read: elements of tensor `index` from `start` on."""

    index: int
    start: int
    numel: int
    """Of a record of values, how many there are; else how many have changed."""
    is_values: bool
    body: Tensor
    """1-D bytes."""
    _lengths: tuple[int, int, int] = (0, 0, 0)

    def new_values(self, bits: Tensor) -> tuple[Tensor | None, Tensor]:
        """The positions in the tensor (None if they are `[start, start + numel)`), and the integers to put there.

        Args:
            bits: the integers of the whole tensor as they are.

        Raises:
            PublishError: if the record is about elements that the tensor lacks.
        """
        if self.is_values:
            new = _aligned(self.body, bits.dtype)
            self._check(self.start, self.start + new.numel(), bits)
            return None, new.to(bits.device)
        entries, other_entries, others = self._lengths
        lengths = (entries, -(-self.numel // 8), other_entries, others * bits.dtype.itemsize)
        gaps, packed, of_others, rest = torch.split(self.body, list(lengths))
        positions, exceptions = _positions(gaps), _positions(of_others)
        if positions.numel() != self.numel or exceptions.numel() != others:
            raise PublishError(f"a record of tensor {self.index} contradicts itself; publish all values again")
        self._check(self.start, self.start + int(positions[-1]) + 1, bits)
        positions = positions.to(bits.device) + self.start
        grew = _unpacked(packed, self.numel).to(device=bits.device, dtype=bits.dtype)
        new = bits[positions] + (grew * 2 - 1)
        if others:
            self._check(0, int(exceptions[-1]) + 1, new)
            new[exceptions.to(bits.device)] = _aligned(rest, bits.dtype).to(bits.device)
        return positions, new

    def _check(self, start: int, stop: int, bits: Tensor) -> None:
        if not 0 <= start <= stop <= bits.numel():
            raise PublishError(
                f"a record is about elements [{start}, {stop}) of tensor {self.index}, which has {bits.numel()} "
                "elements; publish all values again"
            )


def _aligned(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes `data` as integers; a copy only if they begin where integers do not."""
    begins = data.storage_offset() % dtype.itemsize == 0 and data.data_ptr() % dtype.itemsize == 0
    return (data if begins else data.clone()).view(dtype)


def read_records(data: Tensor, itemsizes: list[int]) -> Iterator[Record]:
    """Yield the records in `data`, 1-D bytes.

    Args:
        itemsizes: the bytes of an integer of each tensor of the catalogue.

    Raises:
        PublishError: if there is something else.
    """
    at = 0
    while at < data.numel():
        if data.numel() - at < HEADER_NBYTES:
            raise PublishError("a packet ends inside a record; publish all values again")
        header = bytes(data[at : at + HEADER_NBYTES].tolist())
        index, kind, start, first, second, third, fourth = _HEADER.unpack(header)
        at += HEADER_NBYTES
        if index >= len(itemsizes) or kind not in (_VALUES, _CHANGES):
            raise PublishError(f"a packet has a record of kind {kind} about tensor {index}; publish all values again")
        itemsize = itemsizes[index]
        if kind == _VALUES:
            lengths, nbytes = (0, 0, 0), first * itemsize
        else:
            lengths, nbytes = (second, fourth, third), second + -(-first // 8) + fourth + third * itemsize
        if data.numel() - at < nbytes:
            raise PublishError("a packet ends inside a record; publish all values again")
        yield Record(index, start, first, kind == _VALUES, data[at : at + nbytes], lengths)
        at += nbytes
