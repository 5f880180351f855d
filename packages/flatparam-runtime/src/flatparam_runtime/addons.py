"""Names that this package promises and an add-on has: each is imported when it is first asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

__all__ = ["load", "names_of"]


def load(module: str, what: str) -> ModuleType:
    """Import a module that may not be installed.

    Raises:
        ModuleNotFoundError: if it is not; the message says how to install it, and that `what` needs it.
    """
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        home = top.replace("_", "-")
        raise ModuleNotFoundError(
            f"{what}: expected the package {home}, which is not installed: pip install {home}", name=top
        )
    return importlib.import_module(module)


def names_of(homes: Mapping[str, Collection[str]], package: str) -> Callable[[str], Any]:
    """Return the function `__getattr__` of `package`, which takes the names in `homes` from these add-ons.

    It raises ModuleNotFoundError for the names of an add-on that is not installed; the message says how to install it.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(load(home_of[name], f"{package}.{name}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
