"""An operation that would run, and its work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

__all__ = ["Kernel", "Work", "operands_of"]


@final
@attrs.frozen(eq=False)
class Kernel:
    """An operation that would run, with its arguments and the tensors that it fills."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]

    @property
    def name(self) -> str:
        """The operation's name, without `aten::` and without the underscore of those that write in place."""
        name: str = self.operation._schema.name.partition("::")[2]
        return name if name.startswith("_") else name.rstrip("_")

    @property
    def nbytes(self) -> int:
        """The bytes that it reads and writes."""
        return sum(each.nbytes for each in (*operands_of((self.args, *self.kwargs.values())), *self.results))


def operands_of(values: Any) -> list[Tensor]:
    """The tensors in a value that an operation takes or returns, in lists too."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in operands_of(value)]
    return []


@final
@attrs.frozen
class Work:
    """The work of a kernel, for an estimate of its time."""

    name: str
    flops: int
    nbytes: int
    """The bytes that it reads and writes."""
    dtype: str
    """The dtype of what it computes with."""

    @classmethod
    def of(cls, kernel: Kernel) -> Work:
        """The work of a kernel; torch's own formulas count the operations of matrix products and attention."""
        count: Callable[..., int] | None = flop_registry.get(kernel.operation.overloadpacket)
        flops = 0
        if count is not None:
            out = kernel.results[0] if len(kernel.results) == 1 else tuple(kernel.results)
            # A formula may be for other arguments than these: the gradient of a bias alone, say.
            with contextlib.suppress(IndexError, TypeError, ValueError, AssertionError):
                flops = int(count(*kernel.args, **kernel.kwargs, out_val=out))
        given = operands_of((kernel.args, *kernel.kwargs.values()))
        dtype = next((each.dtype for each in (*kernel.results, *given)), torch.float32)
        return cls(kernel.name, flops, kernel.nbytes, str(dtype).removeprefix("torch."))
