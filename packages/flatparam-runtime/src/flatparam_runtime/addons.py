"""Names that this package promises and an add-on has: each is imported when it is first asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection
from typing import Any

__all__ = ["names_of"]


def names_of(addon: str, names: Collection[str], package: str) -> Callable[[str], Any]:
    """Return the function `__getattr__` of `package`, which takes `names` from the module `addon`.

    It raises ModuleNotFoundError for them if the add-on is not installed; the message says how to install it.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if importlib.util.find_spec(addon) is None:
            home = addon.replace("_", "-")
            raise ModuleNotFoundError(
                f"{package}.{name}: expected the add-on {home}, which is not installed: pip install {home}",
                name=addon,
            )
        value = getattr(importlib.import_module(addon), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
