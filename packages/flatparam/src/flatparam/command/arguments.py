"""The arguments of the command line. Nothing here imports torch, so that help comes at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from flatparam import __version__
from flatparam.addons import commands, load

__all__ = ["parser"]

_TRACE_EXAMPLES: Final = """\
examples:
  flatparam trace --out traces train.py --steps 3
  torchrun --nproc-per-node 2 -m flatparam trace --out traces train.py --steps 3
  FLATPARAM_TRACE=traces torchrun --nproc-per-node 2 train.py --steps 3
  flatparam trace draw both.svg traces/rank0.json traces/rank1.json
  flatparam trace diff traces/rank0.json plan.json

"""


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


class _Lacking(argparse.Action):
    """Say what a command lacks, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.exit(2, f"{parser.prog}: error: {self.dest}\n")


def parser(shared: Any) -> argparse.ArgumentParser:
    """Return the parser of the whole command line; what it returns has a function `run` that takes it.

    Args:
        shared: what commands share, the module `flatparam_files.command`.
    """
    top: argparse.ArgumentParser = shared.Parser(
        prog="flatparam", description="Tools of the flatparam library."
    )
    top.add_argument("--version", action=_Versions)
    groups = top.add_subparsers(metavar="COMMAND", required=True)
    _add_those_of_addons(groups)
    _add_trace(groups, shared)
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


def _add_trace(groups: argparse._SubParsersAction[argparse.ArgumentParser], shared: Any) -> None:
    """Add `trace`, with its commands."""
    text = "record, draw and compare traces: of runs (flatparam.trace) and of plans (flatparam plan --trace)"
    added = groups.add_parser(
        "trace",
        help=text,
        usage="flatparam trace [-h] COMMAND ...\n       flatparam trace --out FOLDER [--] SCRIPT ...\n"
        "       flatparam trace --out FOLDER -m MODULE ...",
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=_TRACE_EXAMPLES + shared.STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.add_argument(
        "--out", metavar="FOLDER", help="run a program as `flatparam run` does; each rank leaves a trace here"
    )
    # By default it would be the whole usage above.
    commands = added.add_subparsers(metavar="COMMAND", required=True, prog="flatparam trace")
    module = "flatparam.command.tracing"
    draw = shared.add_command(
        commands, "draw", "draw the traces of one or more ranks as one SVG picture", module, "draw"
    )
    draw.add_argument("picture", metavar="SVG", type=Path, help="the picture to write")
    draw.add_argument("traces", metavar="TRACE", type=Path, nargs="+", help="a trace")
    diff = shared.add_command(
        commands, "diff", "show where two traces differ, in calls and in time", module, "diff"
    )
    diff.add_argument("first", metavar="A", type=Path, help="a trace")
    diff.add_argument("second", metavar="B", type=Path, help="another")
