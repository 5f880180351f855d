"""The command `flatparam`. Nothing here imports torch before a command needs it, so that help comes at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flatparam import __version__
from flatparam.addons import commands, load

if TYPE_CHECKING:
    from flatparam.observing.picture import Picture

__all__ = ["main"]


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
        # This imports torch.
        from flatparam.resolving.arguments import TRACE_FOLDER

        os.environ[TRACE_FOLDER] = os.path.abspath(traces)
    status: int = programs.run_program(arguments)
    return status


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
    draw = shared.add_command(
        commands, "draw", "draw the traces of one or more ranks as one SVG picture", __name__, "draw"
    )
    draw.add_argument("picture", metavar="SVG", type=Path, help="the picture to write")
    draw.add_argument("traces", metavar="TRACE", type=Path, nargs="+", help="a trace")
    diff = shared.add_command(
        commands, "diff", "show where two traces differ, in calls and in time", __name__, "diff"
    )
    diff.add_argument("first", metavar="A", type=Path, help="a trace")
    diff.add_argument("second", metavar="B", type=Path, help="another")


def draw(chosen: argparse.Namespace) -> int:
    """Write one picture of all traces; a file that is there stays."""
    from flatparam.observing.picture import Picture

    shared = load("flatparam_files.command")
    if chosen.picture.suffix.lower() != ".svg":
        raise shared.ArgumentsError(
            f"{chosen.picture}: expected the name of the picture first, one that ends in .svg"
        )
    if chosen.picture.exists():
        raise shared.ArgumentsError(
            f"{chosen.picture} is there already: choose a different name, or delete it"
        )
    pictures = [_read(path) for path in chosen.traces]
    whole = pictures[0] if len(pictures) == 1 else Picture.together(pictures)
    chosen.picture.write_text(whole.svg(), encoding="utf-8")
    return 0


def diff(chosen: argparse.Namespace) -> int:
    """Show the pieces that the traces have differently often, and each piece's times; returns 1 if any does."""
    from flatparam.observing.picture import columns, shown_seconds

    first, second = _read(chosen.first), _read(chosen.second)
    mine, theirs = first.totals(), second.totals()
    rows = [["", first.title, second.title, "", ""]]
    differs = False
    for lane, name in [*mine, *(key for key in theirs if key not in mine)]:
        (count, seconds), (others, other_seconds) = (
            each.get((lane, name), (0, 0.0)) for each in (mine, theirs)
        )
        differs = differs or count != others
        told = "" if count == others else f"{count} beside {others} times"
        factor = f"x {other_seconds / seconds:.2f}" if seconds and other_seconds else ""
        rows.append([f"{lane}: {name}", shown_seconds(seconds), shown_seconds(other_seconds), factor, told])
    rows.append(["the whole", shown_seconds(first.length), shown_seconds(second.length), "", ""])
    for line in columns(rows):
        load("flatparam_files.command").say(line)
    return 1 if differs else 0


def _read(path: Path) -> Picture:
    from flatparam.observing.picture import Picture

    try:
        return Picture.read(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise load("flatparam_files.command").ArgumentsError(f"{path}: {error}") from error
