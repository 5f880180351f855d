"""Marks on original parameters, which name the flat parameter that holds their values."""

from __future__ import annotations

import weakref
from typing import Final, final

import attrs
from torch import nn

__all__ = ["MARKS", "clear_owner", "mark_owner", "marked_owner"]

MARKS: Final = ("_fsdp_flattened", "_flatparam_owner")
"""The attributes of a parameter that `mark_owner` sets."""


@final
@attrs.frozen
class _Owner:
    """The mark on an original parameter, which names the handle and the index of its values."""

    handle: weakref.ReferenceType[object]
    index: int

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the parameter is marked when its own handle is revived.
        return _nobody, ()


def _nobody() -> None:
    """The owner of a parameter that was copied: none."""


def mark_owner(parameter: nn.Parameter, handle: object, index: int) -> None:
    """Mark an original parameter: `handle`, held weakly, has its values now, as parameter `index`."""
    # Other libraries read this mark too.
    parameter._fsdp_flattened = True  # type: ignore[attr-defined]
    parameter._flatparam_owner = _Owner(weakref.ref(handle), index)  # type: ignore[attr-defined]


def marked_owner(parameter: nn.Parameter) -> tuple[object, int] | None:
    """Return the handle and the index that `mark_owner` set; `None` if it set none, or the handle is gone."""
    owner: _Owner | None = getattr(parameter, "_flatparam_owner", None)
    handle = None if owner is None else owner.handle()
    return None if owner is None or handle is None else (handle, owner.index)


def clear_owner(parameter: nn.Parameter) -> None:
    """Note that no flat parameter holds `parameter` any more."""
    vars(parameter).pop("_flatparam_owner", None)
