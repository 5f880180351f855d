"""The checkpoint that the arguments name."""

from __future__ import annotations

import argparse

from flatparam_files import CheckpointError, Source, open_source, select
from flatparam_files.command.shared import ArgumentsError

__all__ = ["opened", "parts_of"]


def opened(chosen: argparse.Namespace) -> Source:
    """The checkpoint that the arguments name.

    Raises:
        ArgumentsError: if they name none, or both a path and a pair of files.
        CheckpointError: if it cannot be opened.
    """
    pair = [path for path in (chosen.model, chosen.optimizer) if path is not None]
    if bool(pair) == (chosen.source is not None):
        raise ArgumentsError("give either the path of a checkpoint, or --model and --optimizer")
    return parts_of(
        open_source(*(pair or [chosen.source]), format=chosen.format, prefix=chosen.prefix), chosen.only
    )


def parts_of(source: Source, only: list[str] | None) -> Source:
    """The parts of a source that were asked for.

    Raises:
        CheckpointError: if it has none of them.
    """
    if not only:
        return source
    chosen = select(source, only)
    if not chosen.tensors and not chosen.values:
        raise CheckpointError(f"the checkpoint has no {' and no '.join(only)}")
    return chosen
