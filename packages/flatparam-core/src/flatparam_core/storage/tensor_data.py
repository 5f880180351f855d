"""A tensor gets other memory and stays the same object."""

from __future__ import annotations

import torch

__all__ = ["give_data"]


def give_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Make `tensor` use the memory of `data`, of any shape, dtype and device; it keeps its class and its attributes.

    Raises:
        RuntimeError: if torch cannot put the memory of one device under a tensor of a different one (an accelerator
            that is registered as `PrivateUse1` beside the CPU), and something has a weak reference to `tensor`.
    """
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    other = torch.Tensor._make_subclass(type(tensor), data.detach(), tensor.requires_grad)
    other.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
