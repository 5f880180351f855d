"""The handle that holds a parameter, which a mark on the parameter names."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final, final

import attrs
from torch import nn

from flatparam_core.flat_parameter import FlatParameter

if TYPE_CHECKING:
    from flatparam_core.handle import FlatParamHandle

MARKS: Final = ("_fsdp_flattened", "_flatparam_owner")
"""The attributes of a parameter that `mark_owner` sets."""


@final
@attrs.frozen
class _Owner:
    """The mark on an original parameter, which names the handle and the index of its values."""

    handle: weakref.ReferenceType[FlatParamHandle]
    index: int

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the parameter is marked when its own handle is revived.
        return _nobody, ()


def _nobody() -> None:
    """The owner of a parameter that was copied: none."""


def mark_owner(parameter: nn.Parameter, handle: FlatParamHandle, index: int) -> None:
    """Mark an original parameter: `handle`, held weakly, has its values now, as parameter `index`."""
    # Other libraries read this mark too.
    parameter._fsdp_flattened = True  # type: ignore[attr-defined]
    parameter._flatparam_owner = _Owner(weakref.ref(handle), index)  # type: ignore[attr-defined]


def clear_owner(parameter: nn.Parameter) -> None:
    """Note that no flat parameter holds `parameter` any more."""
    vars(parameter).pop("_flatparam_owner", None)


def owner_of(parameter: nn.Parameter) -> tuple[FlatParamHandle, int] | None:
    """Return the flat parameter that holds an original `parameter`, and its index there; `None` if none does."""
    owner: _Owner | None = getattr(parameter, "_flatparam_owner", None)
    handle = None if owner is None else owner.handle()
    return None if owner is None or handle is None else (handle, owner.index)


def handle_of(flat_param: FlatParameter) -> FlatParamHandle | None:
    """Return the handle that a flat parameter belongs to; `None` if it was copied by itself, or the handle is gone."""
    reference = flat_param._held_by
    return None if reference is None else reference()
