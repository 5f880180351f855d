"""Torch's functions that clip gradients, which know a gradient as whole or as a `DTensor`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from types import CellType
from typing import Any, Final

from torch import Tensor, nn

__all__ = ["note_parameters", "route_torchs_clipping"]

_SPREAD: Final[weakref.WeakValueDictionary[int, nn.Parameter]] = weakref.WeakValueDictionary()
"""The parameters whose gradients are parts, by identity: a set would compare tensors."""


def note_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Remember `parameters`, whose gradients torch's function of the norm alone is to refuse."""
    _SPREAD.update((id(parameter), parameter) for parameter in parameters)


@functools.cache
def route_torchs_clipping(
    is_spread: Callable[[object], bool], clip: Callable[..., Tensor], refuse: Callable[[str], None]
) -> None:
    """Have torch's `clip_grad_norm_` call `clip` if some parameter `is_spread`; a second call does nothing.

    Torch's functions call an inner function inside of `no_grad`. That one is replaced, and not a name, because programs
    hold the outer one: `from torch.nn.utils import clip_grad_norm_`.

    Args:
        is_spread: whether the gradient of a parameter is a part.
        clip: has the arguments of torch's function.
        refuse: raises, for a function of torch that was given such gradients.
    """
    cell = _inner(nn.utils.clip_grad_norm_)
    torchs: Callable[..., Tensor] = cell.cell_contents

    @functools.wraps(torchs)
    def routed(parameters: Any, *arguments: Any, **named: Any) -> Tensor:
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        if not isinstance(given, (list, tuple)):
            # Torch warns of a generator without parameters.
            given = list(given) or given
        how = clip if isinstance(given, (list, tuple)) and any(map(is_spread, given)) else torchs
        return how(given, *arguments, **named)

    cell.cell_contents = routed
    norm = getattr(nn.utils, "get_total_norm", None)
    if norm is not None:
        _guard(_inner(norm), refuse)


def _guard(cell: CellType, refuse: Callable[[str], None]) -> None:
    torchs: Callable[..., Tensor] = cell.cell_contents

    @functools.wraps(torchs)
    def guarded(tensors: Any, *arguments: Any, **named: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        parts = {id(parameter.grad) for parameter in _SPREAD.values() if parameter.grad is not None}
        if any(id(tensor) in parts for tensor in given):
            refuse("get_total_norm")
        return torchs(given, *arguments, **named)

    cell.cell_contents = guarded


def _inner(outer: Any) -> CellType:
    """Return the cell of the function that `outer` calls inside of `no_grad`.

    Raises:
        RuntimeError: if this torch's function is made in another way.
    """
    for cell in outer.__closure__ or ():
        if callable(cell.cell_contents) and cell.cell_contents is outer.__wrapped__:
            found: CellType = cell
            return found
    raise RuntimeError(
        f"torch.nn.utils.{outer.__name__} of this torch is not the function that flatparam knows"
    )
