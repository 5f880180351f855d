"""Whether a checkpoint directory is still what was written; and the one loop that verifies any format."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias, final

import attrs

from flatparam_core import Span
from flatparam_files.checkpoint.manifest import MANIFEST
from flatparam_files.checkpoint.reader import CheckpointReader, find_checkpoint
from flatparam_files.disk.checkpoint_error import CheckpointError, UnreadableError
from flatparam_files.disk.system import AnyPath, unreadable

_TRIES: Final = 20
"""How often the latest checkpoint is opened anew because a writer has deleted it."""


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


def verify_checkpoint(path: AnyPath) -> Verification:
    """Read every byte of a checkpoint and compare it with its hash; takes one chunk of memory and no ranks.

    Args:
        path: a run's directory (then its latest checkpoint), or one checkpoint in it.

    Raises:
        CheckpointError: if there is no manifest that can be trusted; what is wrong beyond that is in the result.
    """
    for _ in range(_TRIES):
        with find_checkpoint(Path(path)) as reader:
            found = examine(checks_of_directory(reader))
        # A writer has gone on, and retired what was the latest: there is a newer one.
        if reader.deletion() is None or reader.path == Path(path):
            break
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


def damage_of(path: Path) -> str:
    """The damage of the checkpoint in the directory `path`, after reading its bytes up to there; "" if it has none.

    Raises:
        UnreadableError: if the system could not read a file: nobody knows then whether it is damaged.
    """
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (path / MANIFEST).stat()
        with find_checkpoint(path) as reader:
            for check in checks_of_directory(reader):
                for _ in check():
                    pass
    except UnreadableError:
        raise
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        raise unreadable(error.filename or path, "read", error) from error
    return ""


def checks_of_directory(reader: CheckpointReader) -> Iterator[Check]:
    """Check the headers of all files, and then the blocks of all tensors in files that have passed.

    If the checkpoint is only the newest sound one of its run, that is a problem, too.
    """
    sound: set[int] = set()

    def refuse() -> Iterable[BytesRead]:
        raise CheckpointError(reader.instead_of, path=reader.path)

    def check_header(number: int) -> Iterable[BytesRead]:
        reader.file(number)
        sound.add(number)
        return ()

    def check_blocks(path: str, span: Span) -> Iterable[BytesRead]:
        return (BytesRead(chunk.nbytes) for chunk in reader.read_stored(path, span))

    if reader.instead_of:
        yield refuse
    for number in range(reader.manifest.world_size):
        yield functools.partial(check_header, number)
    for path, record in reader.manifest.tensors.items():
        if sound.issuperset(piece.file for piece in record.pieces):
            yield functools.partial(check_blocks, path, Span(0, record.info.numel))


# The loop, whatever the format


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
