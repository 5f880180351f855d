"""A full parameter that somebody keeps while its memory is free: whoever uses it gets an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from flatparam_core.errors import FlatParamError
from flatparam_core.exposure.owners import owner_of

#: The attributes of a tensor that alias or read its memory; any other is as it was.
_OF_MEMORY: Final = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
#: The methods that neither read memory nor alias it.
_HARMLESS: Final = frozenset(
    (
        *("size", "dim", "numel", "__len__", "stride", "storage_offset", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_inference", "result_type", "_use_count"),
        *("empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "new_ones"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    )
)


class FreedParameter(nn.Parameter):
    """The class that a full parameter has while its memory is free, if somebody keeps it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call `func` if it needs no memory.

        Raises:
            FlatParamError: if it does; the message names the parameter.
        """
        name, of = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        is_attribute = name in ("__get__", "__set__")
        if name in _HARMLESS or (is_attribute and getattr(of, "__name__", "") not in _OF_MEMORY):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        flat = (item for each in args for item in (each if isinstance(each, (tuple, list)) else [each]))
        raise FlatParamError(next((_told(each) for each in flat if isinstance(each, cls)), _told(None)))

    def __repr__(self) -> str:  # type: ignore[override]  # a tensor's takes `tensor_contents`
        return f"<{_told(self)}>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @staticmethod
    def guard(leaf: nn.Parameter) -> None:
        """Have uses of `leaf` raise an error, until `release`."""
        # A class of somebody else has behaviour of its own.
        if type(leaf) is nn.Parameter:
            leaf.__class__ = FreedParameter

    @staticmethod
    def release(leaf: nn.Parameter) -> None:
        """Have `leaf` be an ordinary parameter again; its memory is allocated."""
        if type(leaf) is FreedParameter:
            leaf.__class__ = nn.Parameter  # type: ignore[assignment]  # what it was


def _told(leaf: nn.Parameter | None) -> str:
    owner = None if leaf is None else owner_of(leaf)
    name = "a full parameter" if owner is None else owner[0].told(owner[1])
    return (
        f"{name} was kept past the pass that had gathered it, or returned from a forward without gradients, and is "
        "used while only the shards are in memory; keep or return a copy, .detach().clone(), or read it from its "
        "module, inside a forward pass or summon_full_params()"
    )
