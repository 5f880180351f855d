"""From the arguments of a process to its exit status."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType

from flatparam.command.arguments import parser
from flatparam.command.output import say
from flatparam.command.programs import run_program

__all__ = ["main"]

_INTERRUPTED = 130
_TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: those after the name of the program; by default those of this process.

    Returns:
        The exit status: 0 if all is well, 1 if checkpoints differ or one is damaged, 2 if the arguments or
        an input cannot be used, 130 and 143 after an interrupt and a termination. Whatever it is, no output is left
        half written.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"] and given[1:2] not in (["-h"], ["--help"]):
        # Its arguments are the program's, and so are its signals and its errors.
        return run_program(given[1:])
    if given[:1] == ["trace"] and given[1:2] and given[1].startswith("--out="):
        given[1:2] = given[1].split("=", 1)
    if given[:2] == ["trace", "--out"] and len(given) > 3:
        # So are those of a program that is traced; processes that it starts leave traces, too. This imports torch.
        from flatparam.resolving import TRACE_FOLDER

        os.environ[TRACE_FOLDER] = os.path.abspath(given[2])
        return run_program(given[3:])
    chosen = parser().parse_args(given)
    try:
        return _run(chosen)
    except KeyboardInterrupt:
        _say("interrupted; nothing was written")
        return _INTERRUPTED


def _run(chosen: argparse.Namespace) -> int:
    # Imports torch, which takes seconds: not for help.
    from flatparam_state import CheckpointError

    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, _terminate)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
            status: int = chosen.run(chosen)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (CheckpointError, OSError) as error:
        # The reader of our output has seen enough.
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if isinstance(error, OSError) and error.filename is not None:
            _say(f"{error.filename}: {error.strerror}")
        else:
            _say(str(error))
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    _say("terminated; nothing was written")
    raise SystemExit(_TERMINATED)


def _say(sentence: str) -> None:
    say(f"flatparam: {sentence}", sys.stderr)
