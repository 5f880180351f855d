"""The one loop that verifies checkpoints, whatever their format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, final

import attrs

from flatparam_files.disk import CheckpointError, UnreadableError

__all__ = ["Check", "BytesRead", "Soundness", "examine"]


@final
@attrs.frozen
class Soundness:
    """The result of a verification: the bytes that were read, and their problems; a sound checkpoint has none.

    `unproven_nbytes` of the `nbytes` that were read have no checksum in their format: they are there, and that is all
    that can be said.
    """

    nbytes: int
    unproven_nbytes: int
    problems: tuple[str, ...]
    is_damaged: bool
    """Whether some problem is damage: the system could read the file, and its content is wrong."""


@final
@attrs.frozen
class BytesRead:
    """The bytes that a check has read, and whether a checksum proves that they are unchanged."""

    nbytes: int
    is_proven: bool = True


Check: TypeAlias = Callable[[], Iterable[BytesRead]]
"""Reads a part of a checkpoint and compares it with its checksum; raises a CheckpointError if they differ."""


def examine(checks: Iterator[Check], observe: Callable[[int], object] = lambda nbytes: None) -> Soundness:
    """Carry out all `checks`, also those after one that has found a problem.

    Args:
        checks: are asked for one after the other, so that a check may depend on what those before it have found.
        observe: is called with the bytes of each reading.
    """
    nbytes = unproven_nbytes = 0
    problems: dict[str, None] = {}
    is_damaged = False
    for check in checks:
        try:
            for reading in check():
                nbytes += reading.nbytes
                unproven_nbytes += 0 if reading.is_proven else reading.nbytes
                observe(reading.nbytes)
        except CheckpointError as error:
            problems[str(error)] = None
            is_damaged = is_damaged or not isinstance(error, UnreadableError)
    return Soundness(nbytes, unproven_nbytes, tuple(problems), is_damaged)
