"""Processes that a process starts: they install what it has installed, and one that wraps a model says so.

Those are the processes of `multiprocessing`; and of a program that `flatparam run` runs, every process of Python that
gets its environment, and those in which it starts itself. A driver that starts its workers in a way that leaves the
environment behind trains with torch's FSDP1, and nothing else would tell.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing.spawn
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import attrs

from flatparam.compat import Patch

_STARTUP: Final = str(Path(__file__).parent / "startup")
"""The folder of what Python imports when it starts."""

_KEY = "flatparam"
"""The entry of a new process's preparation that is ours; `multiprocessing` looks at those that it knows."""


def patch_of_children(install: Callable[[], object]) -> Patch:
    """Return the patch that has processes of the methods `spawn` and `forkserver` call `install` before anything else.

    Args:
        install: a function that can be imported by its name.
    """
    prepare: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    @functools.wraps(prepare)
    def with_ours(name: str) -> dict[str, Any]:
        return {**prepare(name), _KEY: _Called(install)}

    return Patch(multiprocessing.spawn, "get_preparation_data", with_ours)


def carry_to_processes() -> None:
    """Have each process of Python that inherits this one's environment install it, once it has imported torch.

    So do workers of ray, ranks that a launcher starts, and the processes of those.
    """
    before = os.environ.get("PYTHONPATH", "")
    if _STARTUP not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, before]))


def patch_of_reruns(program: str, *, is_module: bool) -> Patch:
    """Return the patch that has a command which runs `program` with this interpreter run it by `flatparam run`.

    Some libraries start the other ranks so. Any other command is left as it is.

    Args:
        program: the absolute path of a script, or the name of a module.
    """
    made = subprocess.Popen.__init__

    @functools.wraps(made)
    def init(self: Any, args: Any, *others: Any, **named: Any) -> None:
        made(self, _with_run(args, program, is_module), *others, **named)

    return Patch(subprocess.Popen, "__init__", init)


def _with_run(args: Any, program: str, is_module: bool) -> Any:
    """Return the arguments of a command, with `-m flatparam run` before the program if they run it."""
    if not isinstance(args, (list, tuple)) or list(args[:1]) != [sys.executable]:
        return args
    command = [os.fsdecode(word) for word in args]
    found = _program_in(command)
    if found is None:
        return args
    options, named, rest = found
    if is_module:
        is_it = named == ["-m", program]
    else:
        is_it = named[0] != "-m" and os.path.realpath(named[0]) == os.path.realpath(program)
    return [*options, "-m", "flatparam", "run", *named, *rest] if is_it else args


def _program_in(command: list[str]) -> tuple[list[str], list[str], list[str]] | None:
    """Return the interpreter with its options, `[script]` or `["-m", module]`, and the program's arguments.

    None if the command runs neither a script nor a module. The options are those of `python --help`: letters after one
    dash, of which the last may take a value, in the same word or in the next; and words after two.
    """
    place = 1
    while place < len(command):
        word = command[place]
        if not word.startswith("-"):
            return command[:place], [word], command[place + 1 :]
        letters = "" if word.startswith("--") else word[1:]
        taker = next((number for number, letter in enumerate(letters) if letter in _WITH_VALUE), None)
        if word == "-" or (taker is not None and letters[taker] == "c"):
            return None
        # A value that is not in the same word is the next one.
        apart = word == _LONG_WITH_VALUE or taker == len(letters) - 1
        if taker is not None and letters[taker] == "m":
            options = command[:place] + ([f"-{letters[:taker]}"] if taker else [])
            value = command[place + 1 : place + 2] if apart else [letters[taker + 1 :]]
            return options, ["-m", *value], command[place + 1 + apart :]
        place += 1 + apart
    return None


_WITH_VALUE: Final = "cmWX"
"""The one-letter options of the interpreter that take a value."""
_LONG_WITH_VALUE: Final = "--check-hash-based-pycs"


class _Called:
    """An object that is unpickled by calling a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return self._function, ()


_VARIABLE: Final = "FLATPARAM_RUN"
"""The variable with the path of a file that another process makes when it wraps a model; `flatparam run` sets it."""
_STARTERS: Final = re.compile(
    r"(?:^|[\s/])(?:python[\d.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec|srun|ssh)(?:\s|$)"
)
"""A word of a command that may start a worker."""
_wrapped_here: list[bool] = []
"""Not empty if the process of `flatparam run` has wrapped a model itself: it needs no file."""


@final
@attrs.define(eq=False)
class Reach:
    """The knowledge that `flatparam run` has of the program that it runs; at the end it says if no model was wrapped.

    It says so if the program has ended well, and has started workers.
    """

    has_ended_well: bool = False
    _path: str = attrs.field(init=False)
    _has_started: bool = False

    @_path.default
    def _new_path(self) -> str:
        name = f"flatparam-run-{secrets.token_hex(8)}-{os.getpid()}"
        return os.path.join(tempfile.gettempdir(), name)

    def watch(self) -> None:
        """Begin, unless a process around this one does it."""
        if _VARIABLE not in os.environ:
            os.environ[_VARIABLE] = self._path
            self._patch_of_starts().put()
            # It is the last, after threads and whatever the program registers.
            atexit.register(self._end)

    def _patch_of_starts(self) -> Patch:
        made = subprocess.Popen.__init__

        @functools.wraps(made)
        def init(process: Any, args: Any, *others: Any, **named: Any) -> None:
            words = args if isinstance(args, (list, tuple)) else [args]
            with contextlib.suppress(TypeError):
                self._has_started |= any(_STARTERS.search(os.fsdecode(word)) for word in words)
            made(process, args, *others, **named)

        return Patch(subprocess.Popen, "__init__", init)

    def _end(self) -> None:
        # A process that was forked may end here too.
        if not _is_own(self._path):
            return
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            # The processes of ray are no children of this one.
            starts = self._has_started or "ray" in sys.modules
            if starts and self.has_ended_well and not _wrapped_here and sys.stderr is not None:
                sys.stderr.write(
                    "flatparam run: no FullyShardedDataParallel was made in this process, nor in one that it started "
                    "and that was reached; workers that were started with python -I, with a different PYTHONPATH or on "
                    "other hosts were not reached: call flatparam.install() there\n"
                )


def note_wrapped() -> None:
    """Note that this process has wrapped a model, if `flatparam run` has started it, at any distance."""
    path = os.environ.get(_VARIABLE)
    if path is None:
        return
    if _is_own(path):
        _wrapped_here[:] = [True]
        return
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _is_own(path: str) -> bool:
    """Return whether this is the process that looks for the file."""
    return path.endswith(f"-{os.getpid()}")
