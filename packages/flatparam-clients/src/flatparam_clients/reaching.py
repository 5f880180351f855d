"""Whether a program of `flatparam run` makes a wrapper somewhere: in its own process, or in one that it starts.

A driver that starts its workers in a way that leaves the environment behind trains with torch's FSDP1, and nothing else
would tell.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import subprocess
import sys
import tempfile
from typing import Any, Final, final

import attrs

from flatparam.compat.patching import Patch

__all__ = ["Reach", "note_wrapped"]

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
    """What `flatparam run` knows of the program that it runs; at the end it says if no model was wrapped.

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
