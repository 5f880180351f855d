"""Add-ons: packages on top of the layers, imported by name when they are needed. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Final

__all__ = ["commands", "lazily", "load", "tell_clients"]

GROUP: Final = "flatparam.commands"
"""The entry points of subcommands: functions that add theirs to the subparsers of argparse that they are given."""
_KNOWN: Final = {
    "ckpt": "flatparam_files.command:add",
    "plan": "flatparam_plan.command:add",
    "run": "flatparam_clients.command:add",
}
"""The subcommands of our own add-ons, which are also found where nothing is installed, as in a checkout."""
_ADDONS: Final = (
    "flatparam_checkpoint",
    "flatparam_clients",
    "flatparam_files",
    "flatparam_optim",
    "flatparam_plan",
    "flatparam_publish",
)
"""Those that can be lacking."""
_CLIENTS: Final = "flatparam_clients"


def load(module: str) -> ModuleType:
    """Import a module.

    Raises:
        ModuleNotFoundError: if it is of an add-on that is not installed; the message says how to install it.
    """
    addon = module.partition(".")[0]
    if _is_lacking(addon):
        name = addon.replace("_", "-")
        raise ModuleNotFoundError(
            f"expected the add-on {name}, which is not installed: pip install {name} (flatparam[all]: every add-on)",
            name=addon,
        )
    return importlib.import_module(module)


def _is_lacking(addon: str) -> bool:
    return addon in _ADDONS and importlib.util.find_spec(addon) is None


def tell_clients(moment: str) -> None:
    """Call the function `moment` of `flatparam_clients.occasions`, if that add-on is installed."""
    if not _is_lacking(_CLIENTS):
        getattr(load(f"{_CLIENTS}.occasions"), moment)()


def commands() -> dict[str, EntryPoint]:
    """Return the subcommands of add-ons, by name; an installed one comes before what is known here."""
    known = [EntryPoint(name, value, GROUP) for name, value in _KNOWN.items()]
    return {each.name: each for each in (*known, *entry_points(group=GROUP))}


def lazily(package: str, homes: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return the function `__getattr__` of a module, which imports names on first use, and submodules too.

    Args:
        package: the module's `__name__`.
        homes: the names that the module exports, by the modules that have them.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        nothing = AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in home_of:
            value = getattr(load(home_of[name]), name)
        elif name.startswith("__"):
            raise nothing
        else:
            try:
                value = importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
                raise nothing from None
        setattr(sys.modules[package], name, value)
        return value

    return get
