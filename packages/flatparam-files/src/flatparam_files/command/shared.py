"""The common parts of the commands of `flatparam`, those of other packages too. Nothing here imports torch at first."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn, TextIO, TypeAlias

from flatparam_files.disk.limits import without_collector

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a parser has its commands."""


def exit_statuses(one: str = "") -> str:
    """Return what the exit statuses of a command mean, for the end of its help; `one` is what 1 says, if it can be."""
    told = {"0": "all is well", "1": one, "2": "the arguments are wrong, or an input cannot be read"}
    told["130"] = "interrupted (143: terminated); nothing half written is left"
    return "\n".join(["exit status:", *(f"  {status:4} {text}" for status, text in told.items() if text), ""])


class ArgumentsError(Exception):
    """The arguments do not say what to do."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in a line, without all options before it, and takes options between paths."""

    _mixes = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; argparse itself gives up if an option is between the optional path and the other."""
        if self._mixes:
            return super().parse_known_args(args, namespace)
        self._mixes = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        except TypeError:
            # It has commands of its own, or takes all arguments from some place on.
            return super().parse_known_args(args, namespace)
        finally:
            self._mixes = False

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and this message."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def add_command(
    commands: Commands, name: str, text: str, module: str, function: str, *, one: str = ""
) -> argparse.ArgumentParser:
    """Add a command that does `text`, by calling a function of a module that is imported when the command is run.

    Args:
        one: what the exit status 1 says, if the command can end with it.
    """

    def run_it(chosen: argparse.Namespace) -> int:
        with without_collector():
            imported = importlib.import_module(module)
        return int(getattr(imported, function)(chosen))

    added = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=exit_statuses(one),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(run=run_it)
    return added


# The lines that the commands write for people


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line, to stdout by default; what is no text in it (names are from files) is escaped."""
    stream = stream or sys.stdout
    # It was closed when the process began, as by `>&-`.
    if stream is None:
        return
    if not line.isprintable():
        line = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def say_aside(sentence: object) -> None:
    """Write a line of `flatparam` to stderr, beside what a command was asked for."""
    say(f"flatparam: {sentence}", sys.stderr)


# Numbers for people


def scaled(value: float, units: Sequence[str]) -> str:
    """Return a number in the unit that leaves three digits of it; each unit is 1,000 of the one before."""
    number = 0
    # From 999.5 on, three digits of it would be 1000.
    while abs(value) >= (999.5 if number else 1000) and number < len(units) - 1:
        value, number = value / 1000, number + 1
    return f"{value:.0f} {units[0]}" if not number else f"{value:.3g} {units[number]}"


def shown_nbytes(nbytes: float) -> str:
    """Return a number of bytes: `1.23 GB`."""
    return scaled(nbytes, ("B", "kB", "MB", "GB", "TB", "PB"))


# From the arguments of a process to its exit status


# The exit status, and the word for it.
_STOPPED = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}


def run(chosen: argparse.Namespace) -> int:
    """Run a command that a parser has chosen; returns the exit status of the process.

    It is 0 if all is well, 1 if checkpoints differ or one is damaged, 2 if the arguments or an input cannot be used,
    130 and 143 after an interrupt and a termination. Whatever it is, no output is left half written.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in _STOPPED}
    try:
        for number in _STOPPED:
            # What is ignored, as SIGINT in the background of a shell, stays so.
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, stop)
        return _run(chosen, received)
    # Other code, where the signal came, can make another exception of it.
    except BaseException as error:
        if not received and not isinstance(error, KeyboardInterrupt):
            raise
        status, word = _STOPPED[signal.Signals(received[0] if received else signal.SIGINT)]
        say_aside(f"{word}; nothing was written")
        return status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(chosen: argparse.Namespace, received: Sequence[int]) -> int:
    # Imports torch, which takes a second: not for help.
    with without_collector():
        from flatparam_core import FlatParamError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say_aside(f"warning: {message}")
            status: int = chosen.run(chosen)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (ArgumentsError, FlatParamError, OSError) as error:
        if received:
            raise
        # The reader of our output has seen enough.
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if isinstance(error, OSError) and error.filename is not None:
            say_aside(f"{error.filename}: {error.strerror}")
        else:
            say_aside(error)
        return 2
