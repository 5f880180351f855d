"""The command `flatparam`. Nothing here imports torch before a command needs it, so that help comes at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flatparam import __version__
from flatparam.addons import TRACE_FOLDER, commands, load

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: those after the name of the program; by default those of this process.

    Returns:
        The exit status: 0 if all is well, 1 if what is compared differs or is damaged, 2 if the arguments or
        an input cannot be used, 130 and 143 after an interrupt and a termination. Whatever it is, no output is left
        half written.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"] and given[1:2] not in (["-h"], ["--help"]):
        # Its arguments are the program's, and so are its signals and its errors.
        return _run_program(given[1:])
    if given[:1] == ["trace"] and given[1:2] and given[1].startswith("--out="):
        given[1:2] = given[1].split("=", 1)
    if given[:2] == ["trace", "--out"] and len(given) > 3:
        return _run_program(given[3:], traces=given[2])
    try:
        shared = load("flatparam_files.command")
    except ModuleNotFoundError as error:
        sys.stderr.write(f"flatparam: error: {error}\n")
        return 2
    status: int = shared.run(parser(shared).parse_args(given))
    return status


def _run_program(arguments: Sequence[str], *, traces: str | None = None) -> int:
    """Run a program on flatparam, if the add-on that does it is installed; otherwise say what to install.

    Args:
        traces: the folder where the program, and processes that it starts, leave traces.
    """
    try:
        programs = load("flatparam_clients.programs")
    except ModuleNotFoundError as error:
        if error.name != "flatparam_clients":
            raise
        sys.stderr.write(f"flatparam {'run' if traces is None else 'trace'}: error: {error}\n")
        return 2
    if traces is not None:
        os.environ[TRACE_FOLDER] = os.path.abspath(traces)
    status: int = programs.run_program(arguments)
    return status


class _Versions(argparse.Action):
    """Show the versions and exit; torch's is read from its metadata."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show the versions, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "not installed"
        sys.stdout.write(f"flatparam {__version__}, torch {torch}\n")
        parser.exit()


class _Completion(argparse.Action):
    """Write the script by which a shell completes the command line, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, value: Any, *__: Any) -> None:
        try:
            import shtab
        except ModuleNotFoundError:
            parser.error("--print-completion takes shtab: pip install shtab (flatparam[completion])")
        for action in _actions(parser):
            if getattr(action.type, "__name__", action.dest) in ("Path", "existing", "SCRIPT"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        sys.stdout.write(shtab.complete(parser, shell=value))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)


class _Lacking(argparse.Action):
    """Say what a command lacks, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.exit(2, f"{parser.prog}: error: {self.dest}\n")


def parser(shared: Any) -> argparse.ArgumentParser:
    """Return the parser of the whole command line; what it returns has a function `run` that takes it.

    Args:
        shared: what commands share, the module `flatparam_files.command`.
    """
    top: argparse.ArgumentParser = shared.Parser(prog="flatparam", description="Tools of the flatparam library.")
    top.add_argument("--version", action=_Versions)
    shells = ("bash", "zsh", "tcsh")
    top.add_argument(
        "--print-completion", action=_Completion, choices=shells, help="write a script for this shell, and exit"
    )
    groups = top.add_subparsers(metavar="COMMAND", required=True)
    _add_those_of_addons(groups)
    return top


def _add_those_of_addons(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add each command of an add-on, or what says why it is lacking."""
    for name, command in commands().items():
        try:
            add = getattr(load(command.module), command.attr)
        except (ImportError, AttributeError) as error:
            # No prefix is that of an option, so whatever follows is taken.
            told = str(error).replace("%", "%%")
            lacking = groups.add_parser(name, help=told, add_help=False, prefix_chars="\0")
            lacking.add_argument(str(error), action=_Lacking, nargs="*")
        else:
            add(groups)
