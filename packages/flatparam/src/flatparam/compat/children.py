"""Processes that a process starts: they install what it has installed.

Those are the processes of `multiprocessing`, and those in which a program that `flatparam run` runs starts itself.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from flatparam.compat.patching import Patch

__all__ = ["patch_of_children", "patch_of_reruns"]

_KEY = "flatparam"
"""The entry of a new process's preparation that is ours; `multiprocessing` looks at those that it knows."""


def patch_of_children(install: Callable[[], object]) -> Patch:
    """The patch that has processes of the methods `spawn` and `forkserver` call `install` before anything else.

    Args:
        install: a function that can be imported by its name.
    """
    prepare: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    @functools.wraps(prepare)
    def with_ours(name: str) -> dict[str, Any]:
        return {**prepare(name), _KEY: _Called(install)}

    return Patch(multiprocessing.spawn, "get_preparation_data", with_ours)


def patch_of_reruns(program: str, *, is_module: bool) -> Patch:
    """The patch that has a command which runs `program` with this interpreter run it by `flatparam run`.

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
    """The arguments of a command, with `-m flatparam run` before the program if they run it."""
    if not isinstance(args, (list, tuple)) or list(args[:1]) != [sys.executable]:
        return args
    command = list(args)
    for place, word in enumerate(command[1:], start=1):
        if word == "-m":
            is_it = is_module and command[place + 1 : place + 2] == [program]
        elif str(word).startswith("-"):
            continue
        else:
            is_it = not is_module and os.path.realpath(word) == os.path.realpath(program)
        return [*command[:place], "-m", "flatparam", "run", *command[place:]] if is_it else args
    return args


class _Called:
    """An object that is unpickled by calling a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return self._function, ()
