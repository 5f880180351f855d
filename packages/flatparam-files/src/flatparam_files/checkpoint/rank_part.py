"""The part of one rank: the file that it writes for a checkpoint, and its report about that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs
import xxhash
from torch import Tensor
from typing_extensions import Self

from flatparam_core import Span
from flatparam_files.checkpoint.directory import Moment, OnMoment, nothing
from flatparam_files.checkpoint.fields import file_dtype, read_sealed, seal
from flatparam_files.checkpoint.manifest import BLOCK_NBYTES, FilePiece, FileRecord, RankValue, TensorRecord, rank_file
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.safetensors import Staging, TensorFileWriter
from flatparam_files.disk.source import TensorInfo
from flatparam_files.disk.system import ReopenedFile, bytes_view, new_file, sync_file


@final
@attrs.frozen
class Ticket:
    """A save that has begun: everything that the ranks must know of it."""

    step: int
    save_id: str
    follows: str | None
    temporary: Path
    number: int = 1
    """The number that this save will have in its directory."""


# The report of a rank that has written its file


_ONE_DIRECTORY: Final = "all ranks must see one and the same directory: name one on a file system that all hosts share"


@final
@attrs.frozen
class RankReport:
    """That a rank has written its file, and what is in it."""

    save_id: str
    rank: int
    file: FileRecord
    tensors: Mapping[str, TensorRecord]
    rank_values: Mapping[str, RankValue]
    aliases: Mapping[str, str]
    values: Any

    def write(self, directory: Path, on_moment: OnMoment = nothing) -> None:
        """Put it into `directory`, whole or not at all."""
        path = report_path(directory, self.rank)
        new = path.with_suffix(".new")
        with new_file(new, buffering=1 << 16) as file:
            file.write(seal(self._to_json()))
        new.replace(path)
        on_moment(Moment.REPORTED)

    def _to_json(self) -> dict[str, Any]:
        return {
            "save_id": self.save_id,
            "rank": self.rank,
            "file": self.file.to_json(),
            "tensors": {path: record.to_json() for path, record in self.tensors.items()},
            "copies": {path: each.to_json() for path, each in self.rank_values.items()},
            "aliases": dict(self.aliases),
            "values": self.values,
        }

    @classmethod
    def read(cls, directory: Path, rank: int, save_id: str) -> Self:
        """Return the report of `rank` in `directory`.

        Raises:
            CheckpointError: if it is not there, or of a different save, or the file is not as it says.
        """
        path = report_path(directory, rank)
        if not path.exists():
            raise CheckpointError(
                f"{path}: rank {rank} wrote this file, rank 0 finds none", path=path, rank=rank, hint=_ONE_DIRECTORY
            )
        tree = read_sealed(path)
        if (tree["save_id"], tree["rank"]) != (save_id, rank):
            raise CheckpointError(f"{path}: expected rank {rank} of save {save_id}", path=path, rank=rank)
        file = FileRecord.from_json(tree["file"], rank)
        found = (directory / file.name).stat().st_size
        if found != file.nbytes:
            raise CheckpointError(
                f"{directory / file.name}: rank {rank} wrote {file.nbytes:,} bytes, rank 0 finds {found:,}",
                path=directory / file.name,
                rank=rank,
                hint=_ONE_DIRECTORY,
            )
        tensors = {at: TensorRecord.from_json(record) for at, record in tree["tensors"].items()}
        values = {at: RankValue.from_json(each) for at, each in tree["copies"].items()}
        return cls(save_id, rank, file, tensors, values, tree["aliases"], tree["values"])


def report_path(directory: Path, rank: int) -> Path:
    """Return the path of the report of rank `rank`."""
    return directory / f"rank-{rank:05d}.done"


# The file that one rank writes


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
        ticket: Ticket,
        rank: int,
        world_size: int,
        pieces: Sequence[tuple[str, TensorRecord, Span]],
        *,
        staging: Staging,
        on_moment: OnMoment = nothing,
        is_reopened: bool = False,
    ) -> None:
        """Begin the file of `rank` in the temporary directory, where it must not exist.

        Args:
            pieces: path, tensor and elements of each piece, in the order in which they will be written.
            is_reopened: have the file open only while something is written: there are very many.
        """
        self._rank = rank
        self._path = path = ticket.temporary / rank_file(rank)
        self._on_moment = on_moment
        self._pieces = [piece for piece in pieces if piece[2]][::-1]
        infos = {_name(at, span): _file_info(record, span) for at, record, span in self._pieces[::-1]}
        self.records = {at: attrs.evolve(record, pieces=()) for at, record, _ in pieces}
        said = {"format": "pt", "save_id": ticket.save_id, "rank": str(rank), "world_size": str(world_size)}
        self._file = ReopenedFile(path) if is_reopened else new_file(path)
        on_moment(Moment.FILE_OPENED)
        try:
            self._writer = TensorFileWriter(self._file, infos, said, staging=staging)
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
        pieces = sorted((*self.records[path].pieces, piece), key=lambda each: each.span)
        self.records[path] = attrs.evolve(self.records[path], pieces=tuple(pieces))
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
