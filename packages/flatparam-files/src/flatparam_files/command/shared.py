"""What the commands of `flatparam` have in common, those of other packages too. Nothing here imports torch."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn, TextIO

from flatparam_files.collector import without_collector

__all__ = ["STATUS", "ArgumentsError", "Parser", "add_command", "say", "scaled", "shown_nbytes", "showing"]

STATUS: Final = """\
exit status:
  0    all is well
  1    the checkpoints differ, or the checkpoint is damaged
  2    the arguments are wrong, or an input cannot be read
  130  interrupted (143: terminated); nothing half written is left
"""


class ArgumentsError(Exception):
    """The arguments do not say what to do."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in a line, without all options before it."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and this message."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


class _Later:
    """A function of a module of the commands, which is imported when it is called."""

    def __init__(self, module: str, function: str) -> None:
        self._module, self._function = module, function

    def __call__(self, chosen: argparse.Namespace) -> int:
        with without_collector():
            module = importlib.import_module(self._module)
        status: int = getattr(module, self._function)(chosen)
        return status


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    module: str,
    function: str,
) -> argparse.ArgumentParser:
    """Add a command that does `text`, by calling a function of a module that is imported when the command is run."""
    added = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(run=_Later(module, function))
    return added


# The lines that the commands write for people


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line, to stdout by default; what is no text in it (names are from files) is escaped."""
    stream = stream or sys.stdout
    # It was closed when the process began, as by `>&-`.
    if stream is None:
        return
    if not line.isprintable():
        line = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode() for each in line
        )
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


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


# Progress in bytes, on a terminal


@contextmanager
def showing(chosen: argparse.Namespace, what: str, nbytes: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar over `nbytes` on stderr, if that is a terminal; yields what is called with each part done."""
    if chosen.quiet or chosen.no_progress or not sys.stderr.isatty():
        yield lambda done: None
        return
    # Imported only if a bar is shown.
    from tqdm import tqdm

    with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=False) as bar:
        yield bar.update
