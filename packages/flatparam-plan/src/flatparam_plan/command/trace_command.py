"""`flatparam trace`: draw and compare what runs and plans have left. Nothing here imports torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from flatparam_files.command import ArgumentsError, add_command, existing, exit_statuses, say
from flatparam_plan.picture import Picture, columns, shown_seconds

_EXAMPLES: Final = """\
examples:
  flatparam trace --out traces train.py --steps 3
  torchrun --nproc-per-node 2 -m flatparam trace --out traces train.py --steps 3
  FLATPARAM_TRACE=traces torchrun --nproc-per-node 2 train.py --steps 3
  flatparam trace draw both.svg traces/rank0.json traces/rank1.json
  flatparam trace diff traces/rank0.json plan.json

"""


def add_trace(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace` to the commands of `flatparam`."""
    text = "record, draw and compare traces: of runs (flatparam.trace) and of plans (flatparam plan --trace)"
    added = groups.add_parser(
        "trace",
        help=text,
        usage="flatparam trace [-h] COMMAND ...\n       flatparam trace --out FOLDER [--] SCRIPT ...\n"
        "       flatparam trace --out FOLDER -m MODULE ...",
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=_EXAMPLES + exit_statuses("the traces of `diff` differ in their calls"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.add_argument(
        "--out", metavar="FOLDER", help="run a program as `flatparam run` does; each rank leaves a trace here"
    )
    # By default it would be the whole usage above.
    commands = added.add_subparsers(metavar="COMMAND, or --out FOLDER SCRIPT", required=True, prog="flatparam trace")
    draw = add_command(commands, "draw", "draw the traces of one or more ranks as one SVG picture", __name__, "draw")
    draw.add_argument(
        "--all", action="store_true", help="the first of several steps, too: in it memory and much else is made"
    )
    draw.add_argument("picture", metavar="SVG", type=Path, help="the picture to write")
    draw.add_argument("traces", metavar="TRACE", type=existing, nargs="+", help="a trace")
    diff = add_command(
        commands, "diff", "show where two traces differ, in calls and in time", __name__, "diff", one="calls differ"
    )
    diff.add_argument("first", metavar="A", type=existing, help="a trace")
    diff.add_argument("second", metavar="B", type=existing, help="another")


def draw(chosen: argparse.Namespace) -> int:
    """Write one picture of all traces; a file that is there stays."""
    if chosen.picture.suffix.lower() != ".svg":
        raise ArgumentsError(f"{chosen.picture}: expected the name of the picture first, which ends in .svg")
    if chosen.picture.exists():
        raise ArgumentsError(f"{chosen.picture} is there already: choose a different name, or delete it")
    pictures = [_read(path) for path in chosen.traces]
    if not chosen.all:
        pictures = [picture.after_first_step() for picture in pictures]
    whole = pictures[0] if len(pictures) == 1 else Picture.together(pictures)
    chosen.picture.write_text(whole.svg(), encoding="utf-8")
    return 0


def diff(chosen: argparse.Namespace) -> int:
    """Show the pieces that the traces have differently often, and each piece's times; returns 1 if any does."""
    first, second = _read(chosen.first), _read(chosen.second)
    mine, theirs = first.totals(), second.totals()
    rows = [["", first.title, second.title, "", ""]]
    differs = False
    for lane, name in [*mine, *(key for key in theirs if key not in mine)]:
        (count, seconds), (others, other_seconds) = (each.get((lane, name), (0, 0.0)) for each in (mine, theirs))
        differs = differs or count != others
        told = "" if count == others else f"{count} beside {others} times"
        factor = f"x {other_seconds / seconds:.2f}" if seconds and other_seconds else ""
        rows.append([f"{lane}: {name}", shown_seconds(seconds), shown_seconds(other_seconds), factor, told])
    rows.append(["the whole", shown_seconds(first.length), shown_seconds(second.length), "", ""])
    for line in columns(rows):
        say(line)
    return 1 if differs else 0


def _read(path: str) -> Picture:
    try:
        return Picture.read(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentsError(f"{path}: {error}") from error
