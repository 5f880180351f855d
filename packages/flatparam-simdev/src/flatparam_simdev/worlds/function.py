"""References to functions, for processes that cannot import their modules by name.

pytest with `--import-mode=importlib` gives test modules names that exist only in the process that ran pytest; the
functions of a script live in `__main__`. So a function travels as its source file and its name in it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

__all__ = ["FunctionReference"]


@attrs.frozen
class FunctionReference:
    """A function of a module, in a form that another process can find; `file` is None for modules without a file."""

    module: str
    file: str | None
    qualname: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> FunctionReference:
        """Return the reference to `fn`. Raises ValueError for lambdas and for functions inside functions."""
        qualname = getattr(fn, "__qualname__", "<unknown>")
        module = getattr(fn, "__module__", None)
        if module is None or "<" in qualname:
            raise ValueError(
                f"run_processes: expected a function at the top level of a module, found {fn!r}; "
                "another process has to find it by its name: move it out of the function that it is in"
            )
        file = getattr(sys.modules.get(module), "__file__", None)
        return cls(module, None if file is None else str(Path(file).resolve()), qualname)

    def resolve(self) -> Callable[..., Any]:
        """Return the function, in this process; imports its module if needed. Raises ImportError or AttributeError."""
        found: Any = self._module()
        for name in self.qualname.split("."):
            found = getattr(found, name)
        resolved: Callable[..., Any] = found
        return resolved

    def _module(self) -> types.ModuleType:
        if self.file is None:
            return importlib.import_module(self.module)
        # multiprocessing has imported the parent's script, if it could, under this name.
        name = "__mp_main__" if self.module == "__main__" else self.module
        directory = str(Path(self.file).parent)
        if directory not in sys.path:
            sys.path.append(directory)
        loaded = sys.modules.get(name)
        if loaded is not None and _is_from(loaded, self.file):
            return loaded
        return _import_if_same(name, self.file) or _import_file(name, self.file)


def _import_if_same(name: str, file: str) -> types.ModuleType | None:
    """Return the module of this name if it is this file, so that packages keep their relative imports; else None."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or str(Path(spec.origin).resolve()) != file:
        return None
    return importlib.import_module(name)


def _is_from(module: types.ModuleType, file: str) -> bool:
    found = getattr(module, "__file__", None)
    return found is not None and str(Path(found).resolve()) == file


def _import_file(name: str, file: str) -> types.ModuleType:
    """Run a file as the module `name`, and make pickle find that module by its name."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"run_processes: expected a Python source file, found {file}")
    # pickle imports the packages above a module first, and these need not exist as directories.
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        package = ".".join(parents[:depth])
        sys.modules.setdefault(package, types.ModuleType(package))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
