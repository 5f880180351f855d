"""`flatparam trace`: draw traces, and compare two."""

from __future__ import annotations

import argparse
from pathlib import Path

from flatparam.addons import load
from flatparam.observing.picture import Picture
from flatparam.observing.table import columns, shown_seconds

__all__ = ["diff", "draw"]

_SHARED = load("flatparam_files.command")


def draw(chosen: argparse.Namespace) -> int:
    """Write one picture of all traces; a file that is there stays."""
    if chosen.picture.suffix.lower() != ".svg":
        raise _SHARED.ArgumentsError(
            f"{chosen.picture}: expected the name of the picture first, one that ends in .svg"
        )
    if chosen.picture.exists():
        raise _SHARED.ArgumentsError(
            f"{chosen.picture} is there already: choose a different name, or delete it"
        )
    pictures = [_read(path) for path in chosen.traces]
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
        (count, seconds), (others, other_seconds) = (
            each.get((lane, name), (0, 0.0)) for each in (mine, theirs)
        )
        differs = differs or count != others
        told = "" if count == others else f"{count} beside {others} times"
        factor = f"x {other_seconds / seconds:.2f}" if seconds and other_seconds else ""
        rows.append([f"{lane}: {name}", shown_seconds(seconds), shown_seconds(other_seconds), factor, told])
    rows.append(["the whole", shown_seconds(first.length), shown_seconds(second.length), "", ""])
    for line in columns(rows):
        _SHARED.say(line)
    return 1 if differs else 0


def _read(path: Path) -> Picture:
    try:
        return Picture.read(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _SHARED.ArgumentsError(f"{path}: {error}") from error
