"""Values that are not here yet: in a file, on the first rank, behind `__torch_function__`, or given to shards later."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_runtime import ParamSpec, Span


class LazyValue(abc.ABC):
    """A value in a file, which is read when it is needed."""

    @abc.abstractmethod
    def whole(self) -> Any:
        """Read it; the value has memory of its own."""


class LazyTensor(LazyValue):
    """A tensor in a file, of which a part can be read alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abc.abstractmethod
    def part(self, spec: ParamSpec, span: Span) -> torch.Tensor:
        """Return the elements `span`, in the memory order of `spec`: 1-D, on the CPU, with memory of their own."""


@final
@attrs.frozen(eq=False)
class Streamed:
    """A full tensor that only the first rank has; the others know its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: Any = None
    """The ranks that it is for (see `flatparam_state.ranks.all_of`); known when it is to arrive."""
    device: torch.device | None = None
    tensor: Any = None

    def arrive(self) -> torch.Tensor:
        """Return the tensor, on every rank; every rank calls it. Extra memory: the tensor, until it is dropped."""
        assert self.ranks is not None, "it is completed before it is used"
        full = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if self.tensor is not None:
            full.copy_(as_tensor(self.tensor))
        for group in reversed(self.ranks.groups if full.numel() else ()):
            # Shape and dtype are the first rank's everywhere, so nothing has to be compared.
            group.broadcast(full.view(-1).view(torch.uint8), root=0, label="state of the first rank").wait()
        return full


def is_tensor_like(value: Any) -> bool:
    """Return whether it is a tensor, or stands for one; see `as_tensor`."""
    return isinstance(value, torch.Tensor) or hasattr(value, "__torch_function__")


def as_tensor(value: Any) -> torch.Tensor:
    """`value`, detached, if it is a tensor; else the tensor that it stands for, as torch's functions see it.

    Something stands for a tensor if it has `__torch_function__`, as what is read from a file when it is needed.
    """
    tensor: torch.Tensor = torch.detach(value)
    return tensor


def dtype_of(value: Any) -> torch.dtype:
    """Return the dtype of a tensor, or of what stands for one."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.dtype  # type: ignore[no-any-return]  # it has one


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of what stands for one; that is only made a tensor if it does not say."""
    try:
        with torch._C.DisableTorchFunctionSubclass():  # torch warns of its own ShardedTensor
            return tuple(value.size() if isinstance(value, torch.Tensor) else value.shape)
    except AttributeError:
        return tuple(as_tensor(value).shape)


def not_ordinary(value: Any) -> str | None:
    """The reason that keeps the elements of a tensor from being copied into an ordinary one; `None` if nothing does."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_meta:
        return "a tensor on the meta device, which has no elements"
    if value.is_quantized:
        return f"a quantized tensor ({value.dtype}); dequantize() makes an ordinary one"
    if value.layout is not torch.strided:
        return f"a tensor of the layout {value.layout}; to_dense() makes an ordinary one"
    return None


def is_ordinary(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether it is a tensor of torch's own class, whose elements can be copied into a different one."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not_ordinary(value) is None


def from_first(ranks: Any, value: Any, *, label: str) -> Any:
    """Return the first rank's `value` (small, and picklable), on every rank of a topology, or of all that it has."""
    for group in reversed(ranks.groups):
        value = group.exchange(value if group.rank == 0 else None, label=label)[0]
    return value


@final
@attrs.frozen(eq=False)
class ValuesLater:
    """A `param_init_fn` for tensors whose values come later: of parameters, once they are sharded.

    No memory is made for full parameters; buffers stay on the meta device.
    """

    _known: frozenset[int]
    """The identities of these parameters and buffers."""
    _kept: Sequence[Tensor]
    """The tensors themselves, so that the identities stay theirs."""
    function: Callable[[nn.Module], None] | None = None
    """Gives values to modules that have others on the meta device; by default their `reset_parameters()` does."""

    def __call__(self, module: nn.Module) -> None:
        """Refuse: whoever knows this class asks for `function`.

        Raises:
            TypeError: always.
        """
        raise TypeError("ValuesLater gives no values by itself")

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._known

    @classmethod
    def of(cls, tensors: Sequence[Tensor], function: Callable[[nn.Module], None] | None = None) -> ValuesLater:
        """Leave out these tensors."""
        return cls(frozenset(map(id, tensors)), tensors, function)
