"""Frozen parameters of wrapper classes, such as torchao's quantised weights: their inner tensors, as bytes in a row.

Such a tensor has no memory of its own; it is made of inner tensors of different dtypes (numbers, scales, zero points).
Their bytes are what is sharded, and modules see the tensor again, made of the gathered bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import Self

__all__ = ["WrapperRecipe", "is_wrapper"]

_ALIGNMENT: Final = 16


@final
@attrs.frozen
class _Span:
    """An inner tensor: its bytes among those of the parameter."""

    start: int
    numel: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, data: Tensor) -> Tensor:
        """Return the inner tensor, in the memory of `data`: 1-D, uint8."""
        raw = data[self.start : self.start + self.numel * self.dtype.itemsize]
        if raw.data_ptr() % self.dtype.itemsize:
            raw = raw.clone()
        return raw.view(self.dtype).view(self.shape)


@final
@attrs.frozen
class WrapperRecipe:
    """How a tensor of a wrapper class is made of bytes again."""

    _make: Callable[..., Tensor]
    _context: Any
    _shape: torch.Size
    _stride: tuple[int, ...]
    _parts: dict[str, Any]
    """By the name of an attribute, an inner tensor: a span of the bytes, or a recipe for one of a wrapper class."""

    @classmethod
    def of(cls, tensor: Tensor) -> tuple[Self, Tensor]:
        """Return the recipe of `tensor`, and the bytes: 1-D, uint8, on the device of the inner tensors.

        Each inner tensor begins at a multiple of 16 bytes. They have to be on one device.
        """
        rows: list[Tensor] = []
        recipe = cls._collect(tensor, rows)
        return recipe, torch.cat(rows)

    @classmethod
    def _collect(cls, tensor: Tensor, rows: list[Tensor]) -> Self:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # is_wrapper
        parts: dict[str, Any] = {}
        for name in names:
            inner = getattr(tensor, name)
            if is_wrapper(inner):
                parts[name] = cls._collect(inner, rows)
                continue
            start = sum(row.numel() for row in rows)
            parts[name] = _Span(start, inner.numel(), inner.dtype, inner.shape)
            rows.append(inner.detach().contiguous().view(-1).view(torch.uint8))
            rows.append(rows[-1].new_zeros(-rows[-1].numel() % _ALIGNMENT))
        make = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]  # is_wrapper
        return cls(make, context, tensor.shape, tensor.stride(), parts)

    def made_of(self, data: Tensor) -> Tensor:
        """Return the tensor whose bytes `data` has (1-D, uint8); its inner tensors are in that memory."""
        inner = {
            name: part.of(data) if isinstance(part, _Span) else part.made_of(data)
            for name, part in self._parts.items()
        }
        return self._make(inner, self._context, self._shape, self._stride)

    def __call__(self, data: Tensor) -> nn.Parameter:
        """Return the same as a frozen parameter, which modules see."""
        return nn.Parameter(self.made_of(data.detach()), requires_grad=False)

    def flattened(self, value: object) -> object:
        """Return the bytes of `value`, if it is a tensor like the one that this recipe makes; else `value`."""
        if not isinstance(value, Tensor) or not is_wrapper(value):
            return value
        recipe, data = self.of(value)
        return data if recipe == self else value


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether `tensor` is of a wrapper class whose inner tensors can be taken out and put together again."""
    return bool(is_traceable_wrapper_subclass(tensor)) and hasattr(type(tensor), "__tensor_unflatten__")
