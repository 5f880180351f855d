"""The memory of tensors as bytes, and bytes as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["buffer_of", "bytes_view", "tensor_of"]


def bytes_view(tensor: Tensor) -> Tensor:
    """The elements of `tensor` in row-major order as 1-D bytes; a view if it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # One element of a larger tensor counts as contiguous, whatever its stride.
    if flat.stride() != (1,):
        flat = flat.as_strided((flat.numel(),), (1,)) if flat.numel() == 1 else flat.contiguous()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def tensor_of(data: bytearray, dtype: torch.dtype) -> Tensor:
    """The 1-D tensor whose memory `data` is."""
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def buffer_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in row-major order, in memory of their own."""
    data = bytearray(tensor.numel() * tensor.element_size())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(bytes_view(tensor))
    return memoryview(data)
