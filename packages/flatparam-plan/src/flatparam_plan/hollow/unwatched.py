"""Things that torch does in place, but not while somebody watches the dispatcher."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN: Final = torch.ops.aten
_ENGINE: Final = "_engine_run_backward"
_ZEROS: Final = frozenset((_ATEN.new_zeros.default, _ATEN.zeros.default, _ATEN.zeros_like.default))
_PRODUCTS: Final = frozenset((_ATEN.mm.default, _ATEN.bmm.default, _ATEN.mv.default))
_FILLS_ZEROS: Final = {
    _ATEN.scatter.src: _ATEN.scatter_.src,
    _ATEN.scatter.value: _ATEN.scatter_.value,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
    _ATEN.index_put.default: _ATEN.index_put_.default,
    _ATEN.index_add.default: _ATEN.index_add_.default,
    _ATEN.put.default: _ATEN.put_.default,
}
"""The operations of the backward passes of gather, max, sort, indexing and so on on zeros that they have just made."""
_LOGITS_NODE: Final = "BinaryCrossEntropyWithLogitsBackward0"
_OF_LOGITS: Final = {_ATEN.sub.Tensor: _ATEN.sub_.Tensor, _ATEN.mul.Tensor: _ATEN.mul_.Tensor}
_MADE_OF_LOGITS: Final = frozenset((_ATEN.sigmoid.default, _ATEN.add.Scalar))
"""The tensor that the backward pass of a cross-entropy of logits makes, and the operation on it then."""
_LOOKS: Final = frozenset((_ATEN.cumprod.default, _ATEN.isnan.default))
"""The first operation of a backward pass that looks at values, unless somebody watches: of prod, cumprod and max."""


MATTERS: Final = frozenset(
    (
        *_ZEROS,
        *_PRODUCTS,
        *_FILLS_ZEROS,
        *_OF_LOGITS,
        *_MADE_OF_LOGITS,
        *_LOOKS,
        _ATEN._unsafe_view.default,
        _ATEN.add.Tensor,
    )
)
"""The operations that may be written in place, or begin what is."""


def looks_at_values(func: Any, frame: FrameType | None) -> str | None:
    """Return the name of the node of autograd whose work depends on values, if `func` is a part of one."""
    if func not in _LOOKS or frame is None or frame.f_code.co_name != _ENGINE:
        return None
    node: Any = torch._C._current_autograd_node()
    return None if node is None else str(node.name())


@final
@attrs.define(eq=False)
class Composing:
    """Knows which operations torch's own code would write in place.

    Some functions of torch are made of others: a linear layer adds its bias to a product, the backward pass of
    `gather` fills zeros. They do so in place, unless somebody watches. Operations that come from one instruction of
    Python are parts of one function.
    """

    clock: int = 0
    """The number of operations so far."""
    _made: tuple[Any, int, int, int, int] | None = None
    """The operation that made the last product or zeros; the frame and its instruction; the address; when."""
    _of_logits: tuple[int, int] | None = None
    """The number of a node of autograd, and the address of what it has made and writes to."""

    def in_place(self, func: Any, args: tuple[Any, ...], frame: FrameType | None) -> Any:
        """The operation that writes to the first argument, which torch would call here instead; `None` if none."""
        if func in _OF_LOGITS:
            known = self._of_logits is not None and frame is not None and self._is_of_logits(args[0], frame)
            return _OF_LOGITS[func] if known else None
        made = self._made
        if made is None or frame is None or made[4] != self.clock - 1:
            return None
        by, caller, instruction, address, _ = made
        given = args[0] if args else None
        if not isinstance(given, Tensor) or caller != id(frame) or instruction != frame.f_lasti:
            return None
        if given.data_ptr() != address:
            return None
        if func is _ATEN._unsafe_view.default:
            self._made = (*made[:4], self.clock)
            return None
        in_backward = frame.f_code.co_name == _ENGINE
        if by in _ZEROS:
            return _FILLS_ZEROS.get(func) if in_backward else None
        if func is _ATEN.add.Tensor and not in_backward and len(args) == 2 and given.dim() > 2:
            return _ATEN.add_.Tensor
        return None

    def note(self, func: Any, result: Any, frame: FrameType | None) -> None:
        """Remember what `func` has made."""
        if (func in _ZEROS or func in _PRODUCTS) and isinstance(result, Tensor) and frame is not None:
            self._made = (func, id(frame), frame.f_lasti, result.data_ptr(), self.clock)
        elif func in _MADE_OF_LOGITS and frame is not None and frame.f_code.co_name == _ENGINE:
            number = _number_of_node(_LOGITS_NODE)
            # With weights of positives the sigmoid comes later, and is what is multiplied with.
            if number is not None and (self._of_logits is None or self._of_logits[0] != number):
                self._of_logits = (number, result.data_ptr())

    def _is_of_logits(self, given: Any, frame: FrameType) -> bool:
        assert self._of_logits is not None, "the caller has looked"
        if frame.f_code.co_name != _ENGINE or self._of_logits[0] != _number_of_node(_LOGITS_NODE):
            return False
        return isinstance(given, Tensor) and given.data_ptr() == self._of_logits[1]


def _number_of_node(name: str) -> int | None:
    """Return the number of the node of autograd that runs now, if it has that name."""
    node: Any = torch._C._current_autograd_node()
    return int(node._sequence_nr()) if node is not None and node.name() == name else None


# Gradients that autograd adds up in place, which it does not while somebody watches the dispatcher


_ADD: Final = torch.ops.aten.add.Tensor


def adds_in_place(args: tuple[Any, ...], kwargs: dict[str, Any], alone: tuple[int, int]) -> bool:
    """Return whether this sum of two tensors is one of two gradients, which autograd would write to the first of them.

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
    """Return how many have the tensor, and how many have its memory, the caller's names among them."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), storage  # type: ignore[attr-defined]


@functools.cache
def owners_if_alone() -> tuple[int, int]:
    """Return the owners of a gradient that nobody else has, as torch's version counts them; zeros if it does not.

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
    """Return whether each element of its extent is one of its own, once."""
    extent = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if step != extent:
            return False
        extent *= length
    return True
