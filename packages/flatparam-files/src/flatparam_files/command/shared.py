"""What the commands of `flatparam` have in common, those of other packages too. Nothing here imports torch."""

from __future__ import annotations

import argparse
import importlib
from typing import Final, NoReturn

from flatparam_files.collector import without_collector

__all__ = ["STATUS", "ArgumentsError", "Parser", "add_command"]

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
        """See `argparse.ArgumentParser.error`."""
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
