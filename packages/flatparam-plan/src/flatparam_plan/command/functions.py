"""Functions that the arguments of `flatparam plan` name as `MODULE:FUNCTION`."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from flatparam_files.command import ArgumentsError

__all__ = ["function_named", "function_with"]


def function_named(name: str) -> Callable[..., Any]:
    """The function of this name; its module is imported.

    Raises:
        ArgumentsError: if it cannot be.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentsError(
            f"expected MODULE:FUNCTION that can be imported, found {name!r}: {error}"
        ) from error
    return found


def function_with(name: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """The function of this name, to be called with `arguments`.

    Raises:
        ArgumentsError: if it does not take them, or cannot be imported.
    """
    make = function_named(name)
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ArgumentsError(
            f"expected --arg for each argument that {name} needs, and for no others, found something else: {error}"
        ) from error
    return functools.partial(make, **arguments)
