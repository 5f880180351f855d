"""`flatparam ckpt verify`: is it still what was written?"""

from __future__ import annotations

import argparse
import sys
import warnings

from flatparam_files import CheckpointError, Source, UnknownFormatError, UnreadableError, verify_source
from flatparam_files.command.numbers import shown_nbytes
from flatparam_files.command.opening import opened
from flatparam_files.command.output import say
from flatparam_files.command.progress import showing
from flatparam_files.command.shared import ArgumentsError

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> int:
    """Verify the checkpoint; returns the exit status."""
    try:
        with warnings.catch_warnings():
            # What is opened instead of a damaged checkpoint is one of the problems below.
            warnings.simplefilter("ignore")
            source = opened(chosen)
    except (ArgumentsError, UnknownFormatError, UnreadableError):
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
        return 1 if found.is_damaged else 2
    if not chosen.quiet:
        unproven = found.unproven_nbytes
        proven = f"{shown_nbytes(found.nbytes - unproven)} are what was written"
        whole = f"{shown_nbytes(unproven)} are there, and have no checksums in this format"
        said = " and ".join(text for text, n in ((proven, found.nbytes - unproven), (whole, unproven)) if n)
        say(f"{source.format}, {len(source.tensors)} tensors: {said or 'nothing to read'}")
    return 0
