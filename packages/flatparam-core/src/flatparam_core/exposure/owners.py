"""Which flat parameter holds the values of an original parameter."""

from __future__ import annotations

import weakref

import attrs
from torch import nn
from typing_extensions import final

__all__ = ["clear_owner", "mark_owner", "marked_owner"]


@final
@attrs.frozen
class _Owner:
    """The mark on an original parameter that says where its values are now."""

    handle: weakref.ReferenceType[object]
    index: int

    def __reduce__(self) -> tuple[object, ...]:
        return _nobody, ()  # a copy of the parameter is marked when its own handle is revived


def _nobody() -> None:
    """Who owns a parameter that was copied."""


def mark_owner(parameter: nn.Parameter, handle: object, index: int) -> None:
    """Note on an original parameter that `handle`, held weakly, has its values now, as its parameter `index`."""
    # A mark that other libraries read too.
    parameter._fsdp_flattened = True  # type: ignore[attr-defined]
    parameter._flatparam_owner = _Owner(weakref.ref(handle), index)  # type: ignore[attr-defined]


def marked_owner(parameter: nn.Parameter) -> tuple[object, int] | None:
    """What `mark_owner` noted; `None` if it noted nothing, or the handle is gone."""
    owner: _Owner | None = getattr(parameter, "_flatparam_owner", None)
    handle = None if owner is None else owner.handle()
    return None if owner is None or handle is None else (handle, owner.index)


def clear_owner(parameter: nn.Parameter) -> None:
    """Note that no flat parameter holds it any more."""
    vars(parameter).pop("_flatparam_owner", None)
