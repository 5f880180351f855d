"""Tensors that are awkward to store, trees of them, and reading a source whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flatparam_core import Span
from flatparam_files.disk.source import Source

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # fmt: skip


def awkward() -> dict[str, torch.Tensor]:
    """One tensor of each kind that a file must get right."""
    torch.manual_seed(0)
    base = torch.randn(50, 60)
    shared = torch.randn(3, 4)
    return {
        **{str(dtype).removeprefix("torch."): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES},
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "rows": base[3:7],
        "slice": base[3:40:2, ::3],
        "column": base[:, 1],
        "transposed": torch.randn(30, 20).t(),
        "permuted": torch.randn(4, 5, 6).permute(2, 0, 1),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 6).expand(7, 6),
        "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, 4, dtype=torch.complex64).conj().imag,
        "tied.a": shared,
        "tied.b": shared,
        "zeros": torch.zeros(300, 300),
        "a/b%": torch.randn(2),
    }


def state() -> dict[str, Any]:
    """A checkpoint of a model and an optimizer, as FSDP's full state has it, and what a program keeps beside them."""
    torch.manual_seed(0)
    return {
        "model": {"0.weight": torch.randn(6, 5), "0.bias": torch.randn(6), "1.weight": torch.randn(3, 6)},
        "optimizer": {
            "state": {
                name: {
                    "step": torch.tensor(2.0),
                    "exp_avg": torch.randn(shape),
                    "exp_avg_sq": torch.rand(shape),
                }
                for name, shape in (("0.weight", (6, 5)), ("0.bias", (6,)), ("1.weight", (3, 6)))
            },
            "param_groups": [
                {"lr": 0.1, "betas": (0.9, 0.99), "fused": None, "params": ["0.weight", "1.weight"]},
                {"lr": 0.2, "betas": (0.9, 0.99), "fused": None, "params": ["0.bias"]},
            ],
        },
        "extra": {"epoch": 3, "note": "päge", "order": torch.randperm(7), "history": [1.5, 2.5]},
    }


def whole(source: Source, path: str) -> torch.Tensor:
    """The tensor `path`, in its shape."""
    info = source.tensors[path]
    chunks = [torch.empty(0, dtype=info.dtype), *source.read(path, Span(0, info.numel))]
    return torch.cat(chunks).view(info.shape)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    one, other = (torch.empty(each.shape, dtype=each.dtype).copy_(each.detach()) for each in (first, second))
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def contents(source: Source) -> dict[str, torch.Tensor]:
    """All tensors by path."""
    return {path: whole(source, path) for path in source.tensors}


def assert_same_source(first: Source, second: Source) -> None:
    """Both have the same tensors and the same values."""
    one, other = contents(first), contents(second)
    assert sorted(one) == sorted(other)
    for path, tensor in one.items():
        assert same(tensor, other[path]), path
    assert plain(first.values) == plain(second.values)


def plain(values: Any) -> Any:
    """Values without the differences that formats make: no empty dictionaries, and lists for tuples."""
    if isinstance(values, Mapping):
        found = {key: plain(value) for key, value in values.items()}
        return {key: value for key, value in found.items() if value != {}}
    return [plain(value) for value in values] if isinstance(values, (list, tuple)) else values


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
