"""Whether a checkpoint is still what was written."""

from __future__ import annotations

import os

import attrs
from typing_extensions import final

from flatparam_runtime import Span
from flatparam_state.checkpoint.reader import CheckpointReader, open_checkpoint
from flatparam_state.errors import CheckpointError

__all__ = ["Verification", "verify_checkpoint"]


@final
@attrs.frozen
class Verification:
    """What was looked at, and what is wrong with it: nothing, where `problems` is empty."""

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
        CheckpointError: where there is no manifest that can be trusted; what is wrong beyond that is in the result.
    """
    with open_checkpoint(path) as reader:
        problems: dict[str, None] = {}
        for number in range(reader.manifest.world_size):
            _note(problems, reader, number)
        for at, record in reader.manifest.tensors.items():
            if not any(piece.file not in reader._files for piece in record.pieces):
                try:
                    for _ in reader.read_stored(at, Span(0, record.info.numel)):
                        pass
                except CheckpointError as error:
                    problems[str(error)] = None
        manifest = reader.manifest
        return Verification(
            str(reader.path),
            manifest.step,
            manifest.save_id,
            manifest.world_size,
            len(reader.tensors),
            reader.nbytes_read,
            tuple(problems),
        )


def _note(problems: dict[str, None], reader: CheckpointReader, number: int) -> None:
    try:
        reader.file(number)
    except CheckpointError as error:
        problems[str(error)] = None
