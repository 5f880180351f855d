"""`flatparam ckpt verify`: is it still what was written?"""

from __future__ import annotations

import argparse
import sys

from flatparam.command.options import ArgumentsError, add_reading, command, opened, say, shown_nbytes
from flatparam.command.progress import add_progress, showing
from flatparam_state import CheckpointError, Source, UnknownFormatError, verify_source

__all__ = ["add_to"]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "read every byte of a checkpoint, and compare it with the checksums that its format has"
    added = command(commands, "verify", text, _run)
    added.add_argument("source", metavar="PATH", nargs="?", help="the checkpoint")
    add_reading(added, parts=False)
    add_progress(added)


def _run(chosen: argparse.Namespace) -> int:
    try:
        source = opened(chosen)
    except (ArgumentsError, UnknownFormatError):
        raise
    except CheckpointError as error:
        say(f"flatparam: {error}", sys.stderr)
        return 1
    return _verified(source, chosen)


def _verified(source: Source, chosen: argparse.Namespace) -> int:
    total = sum(info.nbytes for info in source.tensors.values())
    with showing(chosen, "verify", total) as observe:
        found = verify_source(source, observe)
    for problem in found.problems:
        say(f"flatparam: {problem}", sys.stderr)
    if found.problems:
        return 1
    if not chosen.quiet:
        unproven = found.unproven_nbytes
        proven = f"{shown_nbytes(found.nbytes - unproven)} are what was written"
        whole = f"{shown_nbytes(unproven)} are there, and have no checksums in this format"
        said = " and ".join(text for text, n in ((proven, found.nbytes - unproven), (whole, unproven)) if n)
        say(f"{source.format}, {len(source.tensors)} tensors: {said or 'nothing to read'}")
    return 0
