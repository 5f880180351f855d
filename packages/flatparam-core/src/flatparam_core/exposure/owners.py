"""Which flat parameter holds the values of an original parameter."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import attrs
from torch import nn
from typing_extensions import final

if TYPE_CHECKING:
    from flatparam_core.handle import FlatParamHandle

__all__ = ["clear_owner", "mark_owner", "owner_of"]


@final
@attrs.frozen
class _Owner:
    """The mark on an original parameter that says where its values are now."""

    handle: weakref.ReferenceType[FlatParamHandle]
    index: int

    def __reduce__(self) -> tuple[object, ...]:
        return _nobody, ()  # a copy of the parameter is marked when its own handle is revived


def _nobody() -> None:
    """Who owns a parameter that was copied."""


def mark_owner(parameter: nn.Parameter, handle: FlatParamHandle, index: int) -> None:
    """Note on an original parameter where its values are now; see `owner_of`."""
    parameter._fsdp_flattened = True  # type: ignore[attr-defined]  # a mark that other libraries read too
    parameter._flatparam_owner = _Owner(weakref.ref(handle), index)  # type: ignore[attr-defined]  # a mark of ours


def owner_of(parameter: nn.Parameter) -> tuple[FlatParamHandle, int] | None:
    """The flat parameter that holds an original `parameter`, and its index there; `None` where none does."""
    owner: _Owner | None = getattr(parameter, "_flatparam_owner", None)
    handle = None if owner is None else owner.handle()
    return None if owner is None or handle is None else (handle, owner.index)


def clear_owner(parameter: nn.Parameter) -> None:
    """Note that no flat parameter holds it any more."""
    vars(parameter).pop("_flatparam_owner", None)
