"""From the arguments of a process to its exit status."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType

from flatparam_files.collector import without_collector
from flatparam_files.command.ckpt_arguments import add
from flatparam_files.command.shared import ArgumentsError, Parser, say

__all__ = ["main", "run"]

_INTERRUPTED = 130
_TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of this package alone, `python -m flatparam_files ckpt ...`.

    Args:
        arguments: those after the name of the program; by default those of this process.

    Returns:
        The exit status, as `run` has it.
    """
    parser: argparse.ArgumentParser = Parser(prog="flatparam", description="Tools of the flatparam library.")
    add(parser.add_subparsers(metavar="COMMAND", required=True))
    return run(parser.parse_args(arguments))


def run(chosen: argparse.Namespace) -> int:
    """Run a command that a parser has chosen; returns the exit status of the process.

    It is 0 if all is well, 1 if checkpoints differ or one is damaged, 2 if the arguments or an input cannot be used,
    130 and 143 after an interrupt and a termination. Whatever it is, no output is left half written.
    """
    try:
        return _run(chosen)
    except KeyboardInterrupt:
        _say("interrupted; nothing was written")
        return _INTERRUPTED


def _run(chosen: argparse.Namespace) -> int:
    # Imports torch, which takes a second: not for help.
    with without_collector():
        from flatparam_core import FlatParamError

    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, _terminate)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
            status: int = chosen.run(chosen)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (ArgumentsError, FlatParamError, OSError) as error:
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
