"""Processes that a process starts: they install what it has installed.

Those are the processes of `multiprocessing`; and of a program that `flatparam run` runs, every process of Python that
gets its environment, and those in which it starts itself.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from flatparam.compat.patching import Patch

__all__ = ["carry_to_processes", "patch_of_children", "patch_of_reruns"]

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
