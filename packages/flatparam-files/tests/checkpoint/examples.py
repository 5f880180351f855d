"""Tensors to write and read."""

import torch


def example(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Arbitrary bytes that are elements of `dtype`."""
    numel = torch.Size(shape).numel()
    raw = torch.arange(numel * dtype.itemsize).to(torch.uint8) % 100
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
