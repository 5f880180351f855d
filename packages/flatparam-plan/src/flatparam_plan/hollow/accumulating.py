"""Gradients that autograd adds up in place, which it does not while somebody watches the dispatcher."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["adds_in_place", "owners_if_alone"]

_ADD: Final = torch.ops.aten.add.Tensor
_ENGINE: Final = "_engine_run_backward"
"""torch's function that runs a backward pass, and so calls what autograd's own code calls."""


def adds_in_place(args: tuple[Any, ...], kwargs: dict[str, Any], alone: tuple[int, int]) -> bool:
    """Whether this sum of two tensors is one of two gradients, which autograd would write to the first of them.

    It does if nothing else has the first, or its memory. A few operations sum up temporaries in their backward passes:
    these cannot be told apart.

    Args:
        alone: see `owners_if_alone`. The caller is the function that torch's dispatcher has called, directly.
    """
    if kwargs or len(args) != 2 or torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled():
        return False
    total, more = args
    if not isinstance(more, Tensor) or total.shape != more.shape or total.dtype != more.dtype:
        return False
    # What a function of the user adds up in its backward pass is called by that function.
    above = sys._getframe(1).f_back
    if above is None or above.f_code.co_name != _ENGINE:
        return False
    return _owners(total) == alone and _is_dense(total)


def _owners(tensor: Tensor) -> tuple[int, int]:
    """How many have the tensor, and how many have its memory, the caller's names among them."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), storage  # type: ignore[attr-defined]


@functools.cache
def owners_if_alone() -> tuple[int, int]:
    """The owners of a gradient that nobody else has, as torch's version counts them; zeros if it does not.

    It is to be asked for outside of a backward pass, and before anybody watches the dispatcher.
    """
    seen = [(0, 0)]

    class Watches(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is _ADD:
                seen[0] = _owners(args[0])
            return func(*args, **(kwargs or {}))

    if not hasattr(Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return seen[0]
    with torch.enable_grad(), torch.device("cpu"):
        leaf = torch.ones(2, requires_grad=True)
        loss = (leaf.sin() * leaf.cos()).sum()
        with Watches():  # type: ignore[no-untyped-call]
            loss.backward()  # type: ignore[no-untyped-call]
    return seen[0]


def _is_dense(tensor: Tensor) -> bool:
    """Whether each element of its extent is one of its own, once."""
    extent = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if step != extent:
            return False
        extent *= length
    return True
