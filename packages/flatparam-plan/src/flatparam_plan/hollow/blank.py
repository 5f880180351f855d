"""Models without memory: copies of them, and the meta device without the time to begin values that nobody has."""

from __future__ import annotations

import copy
from typing import Any, Final, final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Blank", "hollow_copy"]

_FILLS: Final = frozenset(
    [
        Tensor.normal_,
        Tensor.uniform_,
        Tensor.random_,
        Tensor.bernoulli_,
        Tensor.exponential_,
        Tensor.log_normal_,
        Tensor.cauchy_,
        Tensor.geometric_,
    ]
)


@final
class Blank(TorchFunctionMode):
    """Inside, initialisers leave tensors on the meta device as they are; other tensors are filled as always."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS or getattr(func, "__module__", "") == "torch.nn.init":
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def hollow_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of `model` without a byte on an accelerator: what is there is on the meta device in the copy."""
    memo = {} if memo is None else memo
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            there: Tensor = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
    return copy.deepcopy(model, memo)
