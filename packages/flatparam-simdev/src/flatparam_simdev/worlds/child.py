"""The program of each process of `run_processes`: join the group, run the function, report, leave."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist

from flatparam_comm import CollectiveError, ProcessGroupCollectives
from flatparam_comm.errors import cause_among
from flatparam_comm.guarding import tell_failure

#: A child that gets this signal writes down its stacks, even inside a collective.
STACKS_SIGNAL: Final = signal.SIGUSR1


@attrs.frozen
class ChildPlan:
    """The instructions for a child. `payload` holds the pickled arguments, `directory` is the world's own.

    `pg_timeout` is in seconds.
    """

    rank: int
    world_size: int
    function: FunctionReference
    payload: bytes
    directory: str
    pg_timeout: float

    @property
    def stacks(self) -> Path:
        """The file that the child writes its stacks to whenever it gets `STACKS_SIGNAL`."""
        return Path(self.directory, f"stacks-{self.rank}.txt")


@attrs.frozen
class Report:
    """The report of a child before it ends: the pickled result, or its error.

    `is_consequence` says that a collective failed, mostly because another rank failed first.
    """

    result: bytes | None = None
    error: str = ""
    traceback: str = ""
    is_consequence: bool = False


def run_child(plan: ChildPlan, connection: Connection) -> None:
    """Run as rank `plan.rank`, and send one `Report`."""
    with plan.stacks.open("w") as stacks:
        faulthandler.register(STACKS_SIGNAL, file=stacks)
        # A crash in native code writes down where Python was.
        faulthandler.enable(file=stacks)
        try:
            result = pickle.dumps(_run(plan))
        except BaseException as error:
            tell_failure(error, is_final=True)
            connection.send(_report(error))
            # Not through destroy_process_group or interpreter exit: both may wait for ranks that wait for this one.
            os._exit(1)
        connection.send(Report(result))
        _leave()
        faulthandler.unregister(STACKS_SIGNAL)
        faulthandler.disable()


def _run(plan: ChildPlan) -> Any:
    torch.set_num_threads(1)
    fn: Callable[..., Any] = plan.function.resolve()
    args: tuple[Any, ...] = pickle.loads(plan.payload)
    _join(plan)
    return fn(ProcessGroupCollectives(), *args)


def _join(plan: ChildPlan) -> None:
    """Make the default group, and return when every rank has made it.

    A rank whose function ends the group at once would otherwise close connections that another rank is still making. If
    the group cannot be made, mostly another rank is to blame, which has joined, failed and left.
    """
    try:
        dist.init_process_group(
            "gloo",
            init_method=Path(plan.directory, "store").as_uri(),
            rank=plan.rank,
            world_size=plan.world_size,
            timeout=timedelta(seconds=plan.pg_timeout),
        )
        dist.barrier()
    except RuntimeError as error:
        raise CollectiveError(plan.rank, "init_process_group", "", str(error)) from error


def _leave() -> None:
    """Leave the group together: if a rank is gone while another is still sending, the sender fails."""
    try:
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError):
        # The result is delivered. If another rank failed, its own report says so; if `fn` has destroyed the group
        # itself, there is nothing to leave.
        pass


def _report(error: BaseException) -> Report:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Report(None, f"{type(error).__name__}: {error}", text, _is_consequence(error))


def _is_consequence(error: BaseException) -> bool:
    return cause_among(error, CollectiveError, dist.DistError) is not None


@attrs.frozen
class FunctionReference:
    """A function of a module, in a form that another process can find; `file` is None for modules without a file.

    pytest with `--import-mode=importlib` gives test modules names that exist only in the process that ran pytest; the
    functions of a script live in `__main__`. So a function travels as its source file and its name in it.
    """

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
