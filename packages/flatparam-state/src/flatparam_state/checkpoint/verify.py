"""Whether a checkpoint directory is still what was written."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import final

import attrs

from flatparam_runtime import Span
from flatparam_state.checkpoint.reader import CheckpointReader, open_checkpoint
from flatparam_state.soundness import BytesRead, Check, examine

__all__ = ["Verification", "checks_of_directory", "verify_checkpoint"]


@final
@attrs.frozen
class Verification:
    """The bytes of a checkpoint that were read, and what is wrong with them: nothing, if `problems` is empty."""

    path: str
    step: int
    save_id: str
    world_size: int
    tensors: int
    nbytes: int
    """The bytes that were read and compared with their hashes."""
    problems: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether all is as it was written."""
        return not self.problems


def verify_checkpoint(path: str | os.PathLike[str]) -> Verification:
    """Read every byte of a checkpoint and compare it with its hash; takes one chunk of memory and no ranks.

    Args:
        path: a run's directory (then its latest checkpoint), or one checkpoint in it.

    Raises:
        CheckpointError: if there is no manifest that can be trusted; what is wrong beyond that is in the result.
    """
    with open_checkpoint(path) as reader:
        found = examine(checks_of_directory(reader))
        manifest = reader.manifest
        return Verification(
            str(reader.path),
            manifest.step,
            manifest.save_id,
            manifest.world_size,
            len(reader.tensors),
            reader.nbytes_read,
            found.problems,
        )


def checks_of_directory(reader: CheckpointReader) -> Iterator[Check]:
    """Check the headers of all files, and then the blocks of all tensors in files that have passed."""
    sound: set[int] = set()
    for number in range(reader.manifest.world_size):
        yield functools.partial(_check_header, reader, number, sound)
    for path, record in reader.manifest.tensors.items():
        if sound.issuperset(piece.file for piece in record.pieces):
            yield functools.partial(_check_blocks, reader, path, Span(0, record.info.numel))


def _check_header(reader: CheckpointReader, number: int, sound: set[int]) -> Iterator[BytesRead]:
    reader.file(number)
    sound.add(number)
    yield from ()


def _check_blocks(reader: CheckpointReader, path: str, span: Span) -> Iterator[BytesRead]:
    for chunk in reader.read_stored(path, span):
        yield BytesRead(chunk.nbytes)
