"""Python imports this when a process starts that `flatparam run` has started, at any distance: it installs flatparam.

The folder of this file is the first in PYTHONPATH there. A `sitecustomize` that would have been imported otherwise is
imported too. Nothing else happens in a process that does not import torch, so that any version of Python can start.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any


class AfterTorch:
    """A finder that has `install` called when torch has been imported, and before anything is imported from it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find torch as the other finders do."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_install(module: Any) -> None:
            run(module)
            install()

        spec.loader.exec_module = run_and_install
        return spec


def install() -> None:
    """Make FSDP1's names flatparam's, or say that they are not; a program without FSDP1 is not to fail for it."""
    if any(is_under_way(module) for name, module in list(sys.modules.items()) if name.startswith("flatparam")):
        # A process of multiprocessing, which is about to install it; or a program that uses flatparam by itself.
        return
    try:
        importlib.import_module("flatparam").install()
    except (ImportError, RuntimeError) as error:
        sys.stderr.write(
            f"flatparam run: in process {os.getpid()}, which the program has started, FSDP1 is torch's: {error}\n"
        )


def is_under_way(module: Any) -> bool:
    """Return whether the import of `module` has not come to its end."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def import_the_other() -> None:
    """Import the `sitecustomize` that comes after this one, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    ours = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, ours)


if __name__ == "sitecustomize":
    if "torch" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, AfterTorch())
    import_the_other()
