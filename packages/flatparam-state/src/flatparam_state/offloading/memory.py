"""Memory that moves: to a different device, or into files that nobody else can open."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias, final

import attrs
import torch
from torch import Tensor

__all__ = ["Move", "Relocation", "is_mapped", "mapped_in", "to_device"]

_MAPPED: Final[set[int]] = set()
"""The addresses of the mappings that were made."""

Move: TypeAlias = Callable[[Tensor], Tensor]
"""From all bytes of a storage, 1-D, uint8, to the same bytes in a different place."""


@final
@attrs.define(eq=False)
class Relocation:
    """Tensors in new memory, storage by storage: those that shared memory share it there too."""

    move: Move
    nbytes: int = 0
    """The bytes of the storages that were moved."""
    _moved: dict[int, tuple[torch.UntypedStorage, Tensor]] = attrs.field(factory=dict)
    """By a storage's identity, the storage, which stays alive until all are moved, and its bytes in their new place."""

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor with the elements, shape and strides of `tensor` in the new memory; `tensor` is not changed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._moved:
            self._moved[storage._cdata] = (storage, self._bytes_moved(tensor, storage))
        home = self._moved[storage._cdata][1]
        moved = torch.empty(0, dtype=tensor.dtype, device=home.device)
        return moved.set_(home.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _bytes_moved(self, tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        moved = self.move(whole)
        if moved.data_ptr() != whole.data_ptr():
            self.nbytes += storage.nbytes()
        return moved


def to_device(device: torch.device) -> Move:
    """The move to new memory of `device`; from the CPU to the CPU too."""

    def move(whole: Tensor) -> Tensor:
        return torch.empty_like(whole, device=device).copy_(whole)

    return move


def mapped_in(folder: Path) -> Move:
    """The move into files in `folder`, one for each storage, which are mapped into memory and have no name.

    What is read comes from the disk; what is written there is kept in memory, and not in the file. The disk has its
    space back when the mapping is gone, also if the process is killed.
    """

    def move(whole: Tensor) -> Tensor:
        if not whole.numel():
            return whole
        descriptor, name = tempfile.mkstemp(prefix="flatparam-offload-", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(whole.cpu().numpy().data)
            mapped = torch.from_file(name, shared=False, size=whole.numel(), dtype=torch.uint8)
        finally:
            os.unlink(name)
        _MAPPED.add(mapped.data_ptr())
        return mapped

    return move


def is_mapped(tensor: Tensor) -> bool:
    """Whether the elements of `tensor` are in a file of `mapped_in`."""
    if not tensor.is_cpu:
        return False
    storage = tensor.untyped_storage()
    # The address of a mapping that is gone may be that of ordinary memory now.
    return storage.data_ptr() in _MAPPED and not storage.resizable()
