"""Models on the meta device without the time that it takes to begin values which nobody has."""

from __future__ import annotations

from typing import Any, Final, final

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Blank"]

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
