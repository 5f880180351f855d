"""Models that are published, how they change, and what receivers are to have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from flatparam_state import model_state_dict
from flatparam_state.model_tensors import model_tensors


def change(model: nn.Module, step: int, size: float = 1e-3) -> None:
    """Change about every second element of the shards of `model`, most of them so little that bfloat16 hides it."""
    with torch.no_grad():
        for tensor in model_tensors(model):
            if not tensor.dtype.is_floating_point:
                continue
            numel = torch.arange(tensor.local.numel()) + tensor.span.start
            grows = ((numel * 2654435761 + step * 40503) % 7 < 3).view(tensor.local.shape)
            tensor.local.mul_(1 + size * grows.to(tensor.local.dtype))


def expected(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What a receiver is to have of `model`, each tied tensor under its first name; every rank calls it."""
    state = model_state_dict(model)
    found = {}
    for tensor in model_tensors(model):
        value = state[tensor.name]
        found[tensor.name] = value.to(dtype) if dtype and value.is_floating_point() else value.clone()
    return found


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Assert the same names, dtypes, shapes and bits."""
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert bits(found[name]) == bits(value), name


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def digest(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """The sha256 of names and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(dict(tensors).items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + bits(tensor))
    return found.hexdigest()
