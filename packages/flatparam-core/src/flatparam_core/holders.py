"""The handle that holds a parameter."""

from __future__ import annotations

from torch import nn

from flatparam_core.exposure import marked_owner
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.handle import FlatParamHandle

__all__ = ["handle_of", "owner_of"]


def owner_of(parameter: nn.Parameter) -> tuple[FlatParamHandle, int] | None:
    """Return the flat parameter that holds an original `parameter`, and its index there; `None` if none does."""
    owner = marked_owner(parameter)
    if owner is None:
        return None
    handle, index = owner
    assert isinstance(handle, FlatParamHandle), "nothing else marks"
    return handle, index


def handle_of(flat_param: FlatParameter) -> FlatParamHandle | None:
    """Return the handle that a flat parameter belongs to; `None` if it was copied by itself, or the handle is gone."""
    reference = flat_param._held_by
    handle = None if reference is None else reference()
    assert handle is None or isinstance(handle, FlatParamHandle), "nothing else holds one"
    return handle
