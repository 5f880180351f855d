"""`flatparam ckpt diff`: the differences between two checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import attrs
import torch

from flatparam_core import Span
from flatparam_files import Source, TensorInfo, open_source
from flatparam_files.command.inspecting import parts_of
from flatparam_files.command.shared import say, showing

__all__ = ["run"]

_AT_ONCE_NBYTES: Final = 1 << 21
"""Bytes of a tensor that are compared at once."""
_WIDE_NUMEL: Final = 1 << 18
"""Elements that are compared in float64 at once."""
_SHOWN: Final = 20
"""Differences that are shown without `--all`."""


def run(chosen: argparse.Namespace) -> int:
    """Compare the checkpoints; returns the exit status."""
    first, second = (
        parts_of(open_source(path, format=chosen.format, prefix=chosen.prefix), chosen.only)
        for path in (chosen.first, chosen.second)
    )
    differences = [*_structure(first, second, chosen), *_values("", first.values, second.values)]
    differences += _elements(first, second, chosen)
    if not differences:
        if not chosen.quiet:
            say(f"equal: {len(first.tensors)} tensors")
        return 0
    if not chosen.quiet:
        shown = differences if chosen.all else differences[:_SHOWN]
        for line in shown:
            say(line)
        if len(shown) < len(differences):
            say(f"... and {len(differences) - len(shown)} more (--all shows them)")
    return 1


def _structure(first: Source, second: Source, chosen: argparse.Namespace) -> Iterator[str]:
    for name, here, there in ((chosen.first, first, second), (chosen.second, second, first)):
        for path in here.tensors:
            if path not in there.tensors:
                yield f"{path}: only in {name}"
    for path, info in first.tensors.items():
        other = second.tensors.get(path, info)
        if info.shape != other.shape:
            yield f"{path}: shapes {list(info.shape)} and {list(other.shape)}"
        if info.dtype != other.dtype and not chosen.ignore_dtype:
            yield f"{path}: dtypes {info.dtype} and {other.dtype}"


def _values(path: str, first: Any, second: Any) -> Iterator[str]:
    """Yield a line for each difference of two trees of values; a tuple and a list of the same items are equal."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in {**first, **second}:
            where = f"{path}/{key}" if path else str(key)
            if key not in first or key not in second:
                if not _is_bare(first.get(key, second.get(key))):
                    yield f"{where}: only in {'the first' if key in first else 'the second'}"
            else:
                yield from _values(where, first[key], second[key])
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _values(f"{path}/{index}", one, other)
    elif not (type(first) is type(second) and (first == second or first != first)):
        yield f"{path}: {first!r} and {second!r}"


def _is_bare(value: Any) -> bool:
    """Return whether a tree has no value in it: what is left if all that it had were tensors."""
    return value is None or (isinstance(value, Mapping) and all(map(_is_bare, value.values())))


def _elements(first: Source, second: Source, chosen: argparse.Namespace) -> list[str]:
    common = [
        path
        for path, info in first.tensors.items()
        if path in second.tensors and info.shape == second.tensors[path].shape and info.numel
    ]
    found = []
    with showing(chosen, "diff", sum(first.tensors[path].nbytes for path in common)) as observe:
        for path in common:
            info, other_info = first.tensors[path], second.tensors[path]
            difference = _Difference(info, chosen.tolerance)
            step = _AT_ONCE_NBYTES // max(info.dtype.itemsize, other_info.dtype.itemsize)
            for start in range(0, info.numel, step):
                span = Span(start, min(start + step, info.numel))
                one, other = (torch.cat(list(source.read(path, span))) for source in (first, second))
                difference.add(start, one, other)
                observe(one.nbytes)
            if difference.count:
                found.append(f"{path}: {difference}")
    return found


@final
@attrs.define(eq=False)
class _Difference:
    """How two tensors of one shape differ, found chunk by chunk."""

    info: TensorInfo
    tolerance: float
    count: int = 0
    largest: float = -1.0
    at: int = 0

    def add(self, start: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Compare the elements from `start` on."""
        if first.dtype == second.dtype and torch.equal(_bits(first), _bits(second)):
            return
        for begin in range(0, first.numel(), _WIDE_NUMEL):
            parts = [each[begin : begin + _WIDE_NUMEL] for each in (first, second)]
            one, other = map(_wide, parts)
            same = (one == other) | (one.isnan() & other.isnan())
            if first.dtype == second.dtype and not (first.is_floating_point() or first.is_complex()):
                # float64 does not tell large integers apart.
                same = (_bits(parts[0]) == _bits(parts[1])).view(len(parts[0]), -1).all(dim=1)
            apart = (one - other).abs().nan_to_num(nan=torch.inf)
            differing = ~same & (apart > self.tolerance) if self.tolerance else ~same
            self.count += int(differing.sum())
            apart = torch.where(differing, apart, -1.0)
            where = int(apart.argmax())
            if float(apart[where]) > self.largest:
                self.largest, self.at = float(apart[where]), start + begin + where

    def __str__(self) -> str:
        index, left = [], self.at
        for size in reversed(self.info.shape):
            left, here = divmod(left, size)
            index.append(here)
        return (
            f"{self.count} of {self.info.numel} elements differ, by at most {self.largest:.6g} "
            f"(at {index[::-1]})"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
