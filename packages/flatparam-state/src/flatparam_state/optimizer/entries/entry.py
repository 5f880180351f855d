"""One entry of an optimizer's state: how it is copied and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, final

import attrs
import torch

from flatparam_state.forms import is_sharded_tensor

__all__ = ["AsItIs", "State", "copy_value", "is_equal"]

State: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The states of an optimizer: by the name of a parameter, what it has under which name."""


@final
@attrs.frozen(eq=False)
class AsItIs:
    """A saved state that belongs to its parameter as a whole, whatever its shape."""

    value: Any


def copy_value(value: Any, device: torch.device | None) -> Any:
    """`value` with memory of its own, on `device` if one is given; a `ShardedTensor` as it is."""
    # It is of a parameter that no unit holds: only who made it knows its ranks.
    if is_sharded_tensor(value):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: copy_value(each, device) for key, each in value.items()}
    return value


def is_equal(a: Any, b: Any) -> bool:
    """Return whether two values are the same; tensors by their elements, dtype and shape."""
    if a is b:
        return True
    # To compare their elements, ranks would have to communicate.
    if is_sharded_tensor(a) or is_sharded_tensor(b):
        return False
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and torch.equal(a.cpu(), b.cpu())
        )
    return bool(a == b)
