"""The file that one rank writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import final

import attrs
import xxhash
from torch import Tensor

from flatparam_core import Span
from flatparam_files.checkpoint.contribution import OwnedPiece
from flatparam_files.checkpoint.manifest import BLOCK_NBYTES, FilePiece, FileRecord, TensorRecord, file_dtype
from flatparam_files.checkpoint.moments import Moment, OnMoment, nothing
from flatparam_files.disk import (
    ReopenedFile,
    Staging,
    TensorFileWriter,
    TensorInfo,
    bytes_view,
    new_file,
    sync_file,
)

__all__ = ["RankFileWriter", "header_metadata", "write_rank_file"]


def header_metadata(save_id: str, rank: int, world_size: int) -> dict[str, str]:
    """Return the metadata in the header of a rank's file."""
    return {"format": "pt", "save_id": save_id, "rank": str(rank), "world_size": str(world_size)}


@final
class _BlockHashes:
    """The hash of each block of a piece, as its bytes pass by."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash = xxhash.xxh3_128()
        self._nbytes = 0

    def update(self, view: memoryview) -> None:
        while view:
            part, view = view[: BLOCK_NBYTES - self._nbytes], view[BLOCK_NBYTES - self._nbytes :]
            self._hash.update(part)
            self._nbytes += len(part)
            if self._nbytes == BLOCK_NBYTES:
                self._close()

    def _close(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash.reset()
        self._nbytes = 0

    def finish(self) -> tuple[str, ...]:
        if self._nbytes:
            self._close()
        return tuple(self._done)


@final
class RankFileWriter:
    """Writes `rank-00000.safetensors` piece by piece, and knows afterwards where each one is and what it hashes to."""

    def __init__(
        self,
        path: Path,
        rank: int,
        pieces: Sequence[tuple[str, TensorRecord, Span]],
        metadata: Mapping[str, str],
        *,
        staging: Staging,
        on_moment: OnMoment = nothing,
        is_reopened: bool = False,
    ) -> None:
        """Begin the file `path`, which must not exist.

        Args:
            is_reopened: have the file open only while something is written: there are very many.
            pieces: path, tensor and elements of each piece, in the order in which they will be written.
            metadata: what the header carries.
        """
        self._rank = rank
        self._path = path
        self._on_moment = on_moment
        self._pieces = [piece for piece in pieces if piece[2]][::-1]
        infos = {_name(at, span): _file_info(record, span) for at, record, span in self._pieces[::-1]}
        self.records = {at: attrs.evolve(record, pieces=()) for at, record, _ in pieces}
        self._file = ReopenedFile(path) if is_reopened else new_file(path)
        on_moment(Moment.FILE_OPENED)
        try:
            self._writer = TensorFileWriter(self._file, infos, metadata, staging=staging)
        except BaseException:
            self._file.close()
            raise
        self._end = len(self._writer.header)

    def write(self, chunks: Iterable[Tensor]) -> None:
        """Write the next piece that has elements."""
        path, record, span = self._pieces.pop()
        info, hashes = _file_info(record, span), _BlockHashes()
        stored = (bytes_view(chunk) if info.dtype != record.info.dtype else chunk for chunk in chunks)
        self._writer.write(_name(path, span), stored, hashes.update)
        piece = FilePiece(self._rank, self._end, span, hashes.finish())
        self.records[path] = attrs.evolve(self.records[path], pieces=(piece,))
        self._end += info.nbytes
        self._on_moment(Moment.PIECE_WRITTEN)

    def finish(self) -> FileRecord:
        """Wait until everything is on the disk."""
        self._writer.finish()
        sync_file(self._file)
        self._file.close()
        header = self._writer.header
        self._on_moment(Moment.FILE_SYNCED)
        return FileRecord(self._path.name, self._end, len(header), xxhash.xxh3_128_hexdigest(header))

    def close(self) -> None:
        """Close the file, whole or not."""
        self._file.close()


def _name(path: str, span: Span) -> str:
    return f"{path}[{span.start}:{span.stop}]"


def _file_info(record: TensorRecord, span: Span) -> TensorInfo:
    dtype = record.info.dtype
    stored = file_dtype(dtype)
    return TensorInfo((span.numel * dtype.itemsize // stored.itemsize,), stored)


def write_rank_file(
    path: Path,
    rank: int,
    pieces: Sequence[OwnedPiece],
    metadata: Mapping[str, str],
    *,
    staging: Staging,
    on_moment: OnMoment = nothing,
) -> tuple[FileRecord, dict[str, TensorRecord]]:
    """Write all of a rank's pieces; returns the file and, by path, the tensors with the one piece that is in it."""
    plans = [(piece.path, piece.record, piece.span) for piece in pieces]
    writer = RankFileWriter(path, rank, plans, metadata, staging=staging, on_moment=on_moment)
    try:
        for piece in pieces:
            if piece.span:
                writer.write(piece.chunks())
        return writer.finish(), writer.records
    finally:
        writer.close()
