"""The things of add-ons: names that a package promises, and modules behind seams, each imported when asked for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any


def names_of(homes: Mapping[str, str], package: str) -> Callable[[str], Any]:
    """Return the function `__getattr__` of `package`, which takes names from add-ons.

    It raises ModuleNotFoundError for a name whose add-on is not installed; the message says how to install it.

    Args:
        homes: the names that the package promises, with spaces between, by the modules of add-ons that have them.
        package: the package's `__name__`.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        addon = home_of[name].partition(".")[0]
        if importlib.util.find_spec(addon) is None:
            home = addon.replace("_", "-")
            raise ModuleNotFoundError(
                f"{package}.{name}: expected the package {home}, which is not installed: pip install {home}, or from a "
                f"checkout python3 tools/run.py install {home}",
                name=addon,
            )
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get


def module_behind(seam: str, name: str, ours: str) -> Any:
    """Return the module behind a seam, imported; None if none is installed.

    Args:
        seam: the group of entry points, as `flatparam.guard`.
        name: the name of the entry point in it.
        ours: the module that is taken if there is no such entry point, as in a checkout.
    """
    for point in entry_points(group=seam, name=name):
        return point.load()
    is_here = importlib.util.find_spec(ours.partition(".")[0]) is not None
    return importlib.import_module(ours) if is_here else None


@functools.cache
def say_once(text: str) -> None:
    """Warn in the log of this package, once in a process, as of an add-on that is missing."""
    logging.getLogger("flatparam_comm").warning(text)
