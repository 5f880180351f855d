"""Modules that have moved to an add-on, under the names that they had here; each is imported when it is asked for."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from flatparam.addons import load

__all__ = ["find_moved_modules"]

_CLIENTS: Final = "flatparam_clients"
_MOVED: Final = {
    "flatparam.private": f"{_CLIENTS}.private",
    **{
        f"flatparam.{name}": f"{_CLIENTS}.private.{name}"
        for name in ("_debug_utils", "_fsdp_extensions", "_trace_utils")
    },
    **{
        f"flatparam.compat.{name}": f"{_CLIENTS}.{name}"
        for name in ("adapters", "children", "installing", "names", "planning", "reaching", "reading")
    },
    # What programs have saved may name its classes.
    "flatparam.wrapper.averaging": f"{_CLIENTS}.averaging",
}
"""The old name of each module, or of the package around it, and the new one."""


class _Moved(MetaPathFinder, Loader):
    """Finds a module under its old name: it is the very module that has the new one."""

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that has moved, and no other one."""
        is_known = fullname.startswith("flatparam.") and _new_name(fullname) is not None
        return ModuleSpec(fullname, self) if is_known else None

    def exec_module(self, module: ModuleType) -> None:
        """Have the module of the new name take the place of `module`.

        Raises:
            ModuleNotFoundError: if its add-on is not installed; the message says how to install it.
        """
        new = _new_name(module.__name__)
        assert new is not None, "it was found"
        sys.modules[module.__name__] = load(new)


def _new_name(old: str) -> str | None:
    parts = old.split(".")
    for length in range(2, len(parts) + 1):
        new = _MOVED.get(".".join(parts[:length]))
        if new is not None:
            return ".".join([new, *parts[length:]])
    return None


def find_moved_modules() -> None:
    """Have Python find them from now on, before it looks into the folders of the packages around them."""
    sys.meta_path.insert(0, _Moved())
