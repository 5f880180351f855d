"""`flatparam run`: run a program as Python would, with FSDP1's names made flatparam's before its first line.

Nothing here imports torch before a program is run, so that help comes at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final, final

import attrs


class CannotRun(Exception):
    """A program that Python could not run either."""


@final
@attrs.frozen
class Program:
    """A program that is found: the code of `__main__`, and what Python tells it."""

    code: CodeType
    path: str
    """The value of `sys.argv[0]` in the program."""
    folder: str
    """The value of `sys.path[0]` in the program: the folder of a script, the current folder for a module."""
    namespace: dict[str, Any]

    @classmethod
    def script(cls, path: str) -> Program:
        """Return the program in a file, or in `__main__.py` of a folder or a zip file.

        Raises:
            CannotRun: if it cannot be read.
        """
        # As Python has it: `..` stays.
        absolute = os.path.join(os.getcwd(), path)
        if pkgutil.get_importer(absolute) is not None:
            return cls._main_in(absolute, path)
        loader = SourceFileLoader("__main__", absolute)
        try:
            text = loader.get_data(absolute)
        except OSError as error:
            raise CannotRun(f"can't open file {absolute!r}: {error.strerror}") from None
        code = _unwound(lambda: compile(text, absolute, "exec", dont_inherit=True))
        names = {"__file__": absolute, "__loader__": loader, "__package__": None, "__spec__": None}
        return cls(code, path, str(Path(absolute).resolve().parent), {**names, "__cached__": None})

    @classmethod
    def _main_in(cls, folder: str, path: str) -> Program:
        finder: Any = pkgutil.get_importer(folder)
        spec = finder.find_spec("__main__")
        if spec is None:
            raise CannotRun(f"can't find '__main__' module in {folder!r}")
        code = _unwound(lambda: spec.loader.get_code("__main__"))
        return cls(code, path, folder, _told_of(spec))

    @classmethod
    def module(cls, name: str) -> Program:
        """Return the program in a module, or in `__main__` of a package; packages around it are imported.

        Raises:
            CannotRun: if there is none.
        """
        _put_first(os.getcwd())
        spec = _spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = _spec(name)
        loader: Any = None if spec is None else spec.loader
        code = None if loader is None else _unwound(lambda: loader.get_code(name))
        if spec is None or code is None:
            raise CannotRun(f"no module named {name!r} that can be run")
        return cls(code, spec.origin or name, os.getcwd(), _told_of(spec))

    def run(self, arguments: Sequence[str]) -> None:
        """Run it as `__main__`; whatever it raises comes out, with a traceback that begins in the program."""
        main = ModuleType("__main__")
        vars(main).update(self.namespace)
        sys.argv[:] = [self.path, *arguments]
        _put_first(self.folder)
        # It stays there after the end, for exit handlers and threads that go on.
        sys.modules["__main__"] = main
        _unwound(lambda: exec(self.code, vars(main)))


def run_program(arguments: Sequence[str]) -> int:
    """Run `[--] script.py ...`, or `-m module ...`, after `flatparam.install()`.

    Returns:
        The exit status, if the program comes to its end: 0; or 2 if there is no such program.
    """
    rest = list(arguments)
    try:
        find: Callable[[str], Program] = Program.script
        if rest[:1] == ["-m"]:
            find = Program.module
        if rest[:1] in (["-m"], ["--"]):
            del rest[0]
        if not rest:
            raise CannotRun("expected a script, or -m and a module: flatparam run [--] script.py ...")
        is_module = find == Program.module
        # A wrong path is told before torch is imported.
        program = None if is_module else find(rest[0])
        # Before the packages around a module are imported; torch's names are early there.
        from flatparam_clients.children import Reach, carry_to_processes, patch_of_reruns
        from flatparam_clients.installing import install

        install()
        carry_to_processes()
        reach = Reach()
        reach.watch()
        program = program or find(rest[0])
        patch_of_reruns(rest[0] if is_module else os.path.abspath(rest[0]), is_module=is_module).put()
        try:
            program.run(rest[1:])
        except SystemExit as end:
            reach.has_ended_well = not end.code
            raise
        reach.has_ended_well = True
    except CannotRun as error:
        sys.stderr.write(f"flatparam: {error}\n")
        return 2
    return 0


def _told_of(spec: ModuleSpec) -> dict[str, Any]:
    names = {"__file__": spec.origin, "__loader__": spec.loader, "__package__": spec.parent}
    return {**names, "__spec__": spec, "__cached__": spec.cached}


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # The packages around it are imported; what these lack is another matter.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        return None


def _put_first(folder: str) -> None:
    """Have `folder` be the first place to import from, instead of that of the program `flatparam`."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder


def _unwound(call: Any) -> Any:
    """Return the result of `call()`; the interpreter shows no frame of ours in the traceback of an exception."""
    try:
        return call()
    except SystemExit:
        raise
    except BaseException:
        shows = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            inside = _without_ours(trace)
            shows(kind, error.with_traceback(inside), inside)

        sys.excepthook = hook
        raise


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins below the frames of this file."""
    last = None
    found = trace
    while found is not None:
        if found.tb_frame.f_code.co_filename == __file__:
            last = found
        found = found.tb_next
    return trace if last is None else last.tb_next


_RUN_EXAMPLES: Final = """\
examples:
  python -m flatparam run train.py --epochs 3
  torchrun --nproc-per-node 8 -m flatparam run train.py --epochs 3
  accelerate launch --config_file fsdp.yaml -m flatparam run train.py
  flatparam run -m package.train

The exit status is the program's; 2 if there is no such program.
"""


def add(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run`, for its help; the wrapper's `main` takes its arguments apart: most of them are the program's."""
    added = groups.add_parser(
        "run",
        help="run a program that uses torch's FSDP1 or FSDP2 on flatparam, unchanged",
        usage="flatparam run [-h] [--] SCRIPT ...\n       flatparam run [-h] -m MODULE ...",
        description="Run a Python program after flatparam.install(): torch's FSDP1 and FSDP2 are flatparam's there.",
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.add_argument("SCRIPT", help="the program's file, and its arguments")
    added.add_argument("-m", metavar="MODULE", help="the program's module, and its arguments")
