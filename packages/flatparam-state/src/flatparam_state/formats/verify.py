"""Whether the bytes of a checkpoint are what its format says that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
from typing_extensions import final

from flatparam_runtime import Span
from flatparam_state.checkpoint import CheckpointReader
from flatparam_state.errors import CheckpointError
from flatparam_state.files.byte_file import ByteFile
from flatparam_state.formats.stored_source import StoredSource, stored_source
from flatparam_state.formats.tensors import Storage
from flatparam_state.source import Source, chunk_spans

__all__ = ["Soundness", "verify_source"]


@final
@attrs.frozen
class Soundness:
    """What was read of a checkpoint, and what is wrong with it: nothing, where `problems` is empty.

    `unproven_nbytes` of the `nbytes` that were read have no checksum in their format: they are there, and that is all
    that can be said.
    """

    nbytes: int
    unproven_nbytes: int
    problems: tuple[str, ...]


def verify_source(source: Source, observe: Callable[[int], object] = lambda nbytes: None) -> Soundness:
    """Read every byte of a checkpoint, and compare it with the checksums that its format has.

    Args:
        source: what `open_source` returned.
        observe: is called with the bytes of each piece that was read.
    """
    if not isinstance(source, (StoredSource, CheckpointReader)):
        raise TypeError(f"expected what open_source returns, found {type(source).__name__}")
    opened, work = stored_source(source), _Work(observe)
    if opened.reader is not None:
        work.own(opened.reader)
    else:
        work.foreign(opened)
    return Soundness(work.nbytes, work.unproven_nbytes, tuple(work.problems))


@final
class _Work:
    def __init__(self, observe: Callable[[int], object]) -> None:
        self.nbytes = 0
        self.unproven_nbytes = 0
        self.problems: dict[str, None] = {}
        self._observe = observe

    def own(self, reader: CheckpointReader) -> None:
        """Compare the headers of all files, and then the blocks of all tensors in files that have passed."""
        sound: set[int] = set()
        for number in range(reader.manifest.world_size):
            with self._noting():
                reader.file(number)
                sound.add(number)
        for path, record in reader.manifest.tensors.items():
            if sound.issuperset(piece.file for piece in record.pieces):
                with self._noting():
                    for chunk in reader.read_stored(path, Span(0, record.info.numel)):
                        self._saw(chunk.nbytes)

    def foreign(self, source: StoredSource) -> None:
        """Compare the checksums of the parts of files that tensors lie in; read those that have none."""
        seen: set[Storage] = set()
        for stored in source.stored.values():
            with self._noting():
                for storage in stored.storages():
                    if storage not in seen:
                        seen.add(storage)
                        self._storage(storage)

    def _storage(self, storage: Storage) -> None:
        with self._noting(), ByteFile(storage.file) as file:
            storage.check(file)
            if not storage.crc:
                for span in chunk_spans(Span(storage.start, storage.start + storage.nbytes), 1):
                    file.read(span.start, span.numel)
                self.unproven_nbytes += storage.nbytes
            self._saw(storage.nbytes)

    def _saw(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._observe(nbytes)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.problems[str(error)] = None
