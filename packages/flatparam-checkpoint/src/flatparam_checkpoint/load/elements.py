"""The elements of a saved tensor that this rank needs, in the memory order of the model; some are read later."""

from __future__ import annotations

from typing import Any, final

import attrs
import torch
from torch import Tensor

from flatparam_files import CheckpointReader
from flatparam_runtime import ParamSpec, Span
from flatparam_state.forms import LazyTensor, LazyValue

__all__ = ["SavedTensor", "SavedValue", "read_part"]


def read_part(
    reader: CheckpointReader, path: str, stride: tuple[int, ...] | None, span: Span, dtype: torch.dtype
) -> Tensor:
    """Elements `span` of a saved tensor, counted in the memory order of `stride` (row-major if None): 1-D.

    Only these elements' blocks are read, unless the checkpoint has a different memory order.
    """
    record = reader.record(path)
    shape = record.info.shape
    staged = torch.empty(span.numel, dtype=dtype, device="cpu")
    if not span:
        return staged
    if _order(shape, record.stride) == _order(shape, stride):
        done = 0
        for chunk in reader.read_stored(path, span):
            staged[done : done + chunk.numel()].copy_(chunk)
            done += chunk.numel()
        return staged
    full = reader.load(path)
    if stride is not None:
        full = torch.empty_strided(shape, stride, dtype=full.dtype, device="cpu").copy_(full)
        full = full.as_strided((full.numel(),), (1,))
    return staged.copy_(full.reshape(-1)[span.as_slice()])


def _order(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the strides that order elements: those of dimensions longer than 1."""
    stride = stride or ParamSpec("", shape, torch.uint8, requires_grad=False).stride
    return tuple(step for size, step in zip(shape, stride, strict=True) if size > 1)


@final
@attrs.frozen(eq=False)
class SavedValue(LazyValue):
    """A value in a manifest, perhaps with a tensor in a file."""

    _reader: CheckpointReader
    _tree: Any

    def whole(self) -> Any:
        """See `LazyValue`."""
        return self._reader.decode(self._tree)


@final
class SavedTensor(LazyTensor):
    """A tensor of a checkpoint."""

    def __init__(self, reader: CheckpointReader, path: str) -> None:
        """Read nothing yet of the tensor that is at `path` in the checkpoint."""
        info = reader.record(path).info
        self.shape, self.dtype = info.shape, info.dtype
        self._reader, self._path = reader, path

    def whole(self) -> Tensor:
        """See `LazyValue`."""
        return self._reader.load(self._path)

    def part(self, spec: ParamSpec, span: Span) -> Tensor:
        """See `LazyTensor`."""
        return read_part(self._reader, self._path, spec.stride, span, self.dtype)
