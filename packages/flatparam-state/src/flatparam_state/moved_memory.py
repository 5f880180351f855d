"""Memory that moves: to a different device, or into files that nobody else can open."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias, final

import attrs
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # it is public, but not in __all__

from flatparam_runtime import Threshold

PIECE_NBYTES: Final = Threshold(
    "state.pinned_piece_nbytes",
    4 * 2**30,
    "What is offloaded to an accelerator's host lies in pieces of at most so many pinned bytes, but for a storage that "
    "is longer.",
)

_ALIGNMENT: Final = 64
"""Each storage in a piece begins at a multiple of so many bytes."""
_MAPPED: Final[set[int]] = set()
"""The addresses of the mappings that were made."""

Move: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""From all bytes of some storages, each 1-D, uint8, to the same bytes in a different place.

Copies between a device and pinned memory may still run when it returns: see `finish_copies`.
"""


def relocated(tensors: Sequence[Tensor], groups: Sequence[Hashable], move: Move) -> tuple[list[Tensor], int]:
    """Return the tensors in new memory, and the bytes of the storages that were moved; `tensors` are not changed.

    The new tensors have the shapes and strides of `tensors`. Those that shared a storage share one there too.

    Args:
        tensors: what moves.
        groups: for each tensor, the group whose storages move together.
        move: is called once for each group.
    """
    first: dict[int, tuple[Hashable, Tensor]] = {}
    for tensor, group in zip(tensors, groups, strict=True):
        first.setdefault(tensor.untyped_storage()._cdata, (group, tensor))
    homes: dict[int, Tensor] = {}
    for group in dict.fromkeys(groups):
        held = {storage: _bytes_of(tensor) for storage, (of, tensor) in first.items() if of == group}
        homes.update(zip(held, move(list(held.values())), strict=True))
    moved = [_like(tensor, homes[tensor.untyped_storage()._cdata]) for tensor in tensors]
    return moved, sum(home.numel() for home in homes.values())


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _like(tensor: Tensor, home: Tensor) -> Tensor:
    moved = torch.empty(0, dtype=tensor.dtype, device=home.device)
    return moved.set_(home.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def to_device(device: torch.device, *, pin_memory: bool = False) -> Move:
    """Return the move to new memory of `device`; from the CPU to the CPU too.

    Args:
        device: where to.
        pin_memory: whether the memory is pinned; of the CPU only.
    """

    def move(wholes: Sequence[Tensor]) -> list[Tensor]:
        return [
            torch.empty_like(whole, device=device, pin_memory=pin_memory).copy_(whole, non_blocking=True)
            for whole in wholes
        ]

    return move


def pinned(wholes: Sequence[Tensor]) -> list[Tensor]:
    """Move from an accelerator to the pinned memory of its host, in the pieces that `pieces_of` plans.

    Each has a storage of its own, which keeps its piece alive.
    """
    moved = [torch.empty(0, dtype=torch.uint8, device="cpu")] * len(wholes)
    for piece in pieces_of([whole.numel() for whole in wholes], PIECE_NBYTES.value):
        memory = torch.empty(piece.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        for number, start in piece.starts.items():
            whole = wholes[number]
            part = memory[start : start + whole.numel()].copy_(whole, non_blocking=True)
            moved[number] = from_dlpack(to_dlpack(part))
    return moved


@final
@attrs.frozen
class PinnedPiece:
    """Some pinned memory, and the storages that lie in it.

    Attributes:
        nbytes: its length, a power of two, because torch pins powers of two.
        nbytes_used: up to where storages lie.
        starts: by the number of a storage, the byte at which it begins.
    """

    nbytes: int
    nbytes_used: int
    starts: Mapping[int, int]


def pieces_of(sizes: Sequence[int], most: int) -> list[PinnedPiece]:
    """Return where storages of `sizes` bytes lie in pinned memory, of which less than half is empty.

    Args:
        sizes: the bytes of each storage. One of no bytes lies nowhere.
        most: the bytes of the longest piece, but for a storage that is longer.
    """
    lengths = {number: -(-size // _ALIGNMENT) * _ALIGNMENT for number, size in enumerate(sizes) if size}
    waiting = dict(sorted(lengths.items(), key=lambda item: -item[1]))
    pieces = []
    while waiting:
        least = _power_of_two(max(waiting.values()))
        left = _power_of_two(min(sum(waiting.values()), most))
        # All in one piece, or most in a piece of half the length and the rest in shorter ones.
        tried = [_piece(waiting, max(room, least)) for room in (left, left // 2)]
        pieces.append(max(tried, key=lambda piece: piece.nbytes_used / piece.nbytes))
        waiting = {number: each for number, each in waiting.items() if number not in pieces[-1].starts}
    return pieces


def _piece(lengths: Mapping[int, int], room: int) -> PinnedPiece:
    """Return a piece of at most `room` bytes, with each storage, in this order, that still fits."""
    end, starts = 0, {}
    for number, length in lengths.items():
        if end + length <= room:
            starts[number] = end
            end += length
    return PinnedPiece(_power_of_two(end), end, starts)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def finish_copies(devices: Iterable[torch.device]) -> None:
    """Wait until each accelerator among `devices` has done what is queued on its current stream; once for each."""
    for device in set(devices):
        if device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(device).synchronize()


def mapped_in(folder: Path) -> Move:
    """Return the move into files in `folder`, one for each storage, which are mapped into memory and have no name.

    What is read comes from the disk; what is written there is kept in memory, and not in the file. The disk has its
    space back when the mapping is gone, also if the process is killed.
    """

    def move_one(whole: Tensor) -> Tensor:
        if not whole.numel():
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        descriptor, name = tempfile.mkstemp(prefix="flatparam-offload-", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                flat = whole.cpu()
                file.write((ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr()))
            mapped = torch.from_file(name, shared=False, size=whole.numel(), dtype=torch.uint8)
        finally:
            os.unlink(name)
        _MAPPED.add(mapped.data_ptr())
        return mapped

    return lambda wholes: [move_one(whole) for whole in wholes]


def is_mapped(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` are in a file of `mapped_in`."""
    if not tensor.is_cpu:
        return False
    storage = tensor.untyped_storage()
    # The address of a mapping that is gone may be that of ordinary or pinned memory now.
    return storage.data_ptr() in _MAPPED and not storage.resizable() and not tensor.is_pinned()
