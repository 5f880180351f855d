"""Copies of a model that take no memory of an accelerator."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

__all__ = ["hollow_copy"]


def hollow_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of `model` without a byte on an accelerator: what is there is on the meta device in the copy."""
    memo = {} if memo is None else memo
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            there: Tensor = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
    return copy.deepcopy(model, memo)
