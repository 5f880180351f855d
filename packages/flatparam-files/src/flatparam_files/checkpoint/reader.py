"""A checkpoint directory as a `Source`: every block that is read is verified."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

import torch
import xxhash
from torch import Tensor
from typing_extensions import Self

from flatparam_core import Span
from flatparam_files.checkpoint.directory import CheckpointDirectory, read_manifest
from flatparam_files.checkpoint.manifest import (
    BLOCK_NBYTES,
    MANIFEST,
    OF_RANKS,
    FilePiece,
    FileRecord,
    Manifest,
    TensorRecord,
)
from flatparam_files.checkpoint.values import OMIT, decode
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.safetensors import read_header
from flatparam_files.disk.source import CHUNK_NBYTES, TensorInfo, chunk_spans, filled, read_boxes
from flatparam_files.disk.system import OPEN_FILES, AnyPath, ByteFile, tensor_of

_HINT: Final = "use a different checkpoint, or restore the file from a copy"


def is_checkpoint(path: Path) -> bool:
    """Return whether the directory `path` is a checkpoint, or one of a run that has saved some."""
    return (path / MANIFEST).is_file() or bool(CheckpointDirectory(path).steps())


def open_checkpoint(path: AnyPath) -> CheckpointReader:
    """Open a checkpoint for reading: a run's directory (its latest one), or one checkpoint in it.

    If the latest one of a run cannot be told, or its manifest is damaged, this is the newest sound one, with a warning.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    reader = find_checkpoint(Path(path))
    if reader.instead_of:
        warnings.warn(reader.instead_of, stacklevel=2)
    return reader


def find_checkpoint(path: Path) -> CheckpointReader:
    """Do what `open_checkpoint` does, without a warning: the reader tells what it stands for (`instead_of`)."""
    if (path / MANIFEST).exists():
        return CheckpointReader(path, read_manifest(path))
    chosen = CheckpointDirectory(path).choose()
    if chosen is None:
        raise CheckpointError(
            f"{path}: expected a checkpoint here, found none",
            path=path,
            hint=f"give a directory with {MANIFEST}, or one of such directories",
        )
    return CheckpointReader(chosen.path, chosen.manifest, chosen.warning)


def deletion_of(path: Path) -> CheckpointError:
    """Return the error about a checkpoint at `path` that was there and is not there any more."""
    return CheckpointError(
        f"{path}: deleted while it was read, by retention (`keep`) or by somebody",
        path=path,
        hint="read the latest checkpoint again, or keep more of them",
    )


@final
class CheckpointReader:
    """One committed checkpoint. It is a `Source` with the format "flatparam"; close it, or use it in a `with`.

    `nbytes_read` counts what was read of the ranks' files: their headers, once each, and whole blocks of 1 MiB.
    """

    def __init__(self, path: Path, manifest: Manifest, instead_of: str = "") -> None:
        """Open the checkpoint in directory `path`; `open_checkpoint` finds all three."""
        self.path = path
        self.manifest = manifest
        self.instead_of = instead_of
        """The damage because of which this checkpoint stands for the latest one; "" if there is none."""
        self._open: OrderedDict[int, ByteFile] = OrderedDict()
        """The open files by rank, the one that was used last at the end."""
        self._checked: set[int] = set()
        self._nbytes_read_of_closed = 0
        self.observe: Callable[[int], object] = lambda nbytes: None
        """Called with the number of bytes after each read."""

    def __repr__(self) -> str:
        return f"CheckpointReader({str(self.path)!r}, step={self.manifest.step})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its files."""
        for file in self._open.values():
            file.close()

    def deletion(self) -> CheckpointError | None:
        """Return the error that says that this checkpoint was deleted since it was opened; None if it was not."""
        return None if (self.path / MANIFEST).exists() else deletion_of(self.path)

    @property
    def format(self) -> str:
        """`"flatparam"`."""
        return "flatparam"

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its path, but for those that each rank has of its own."""
        return {
            path: record.info for path, record in self.manifest.tensors.items() if not path.startswith(f"{OF_RANKS}/")
        }

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The tree without the tensors, decoded at first use."""
        values = self.decode(self.manifest.values, tensors=False)
        if not isinstance(values, dict):
            raise CheckpointError(f"{self.path / MANIFEST}: its values are no object", path=self.path / MANIFEST)
        return values

    @property
    def facts(self) -> Mapping[str, Any]:
        """The known facts about the program that wrote it.

        `per_rank` names the states that differ between ranks without being cut like their parameter: they are not
        among `tensors`, and only a rank with the same part of the parameter can take them.
        """
        manifest = self.manifest
        return {
            "save_id": manifest.save_id,
            "step": manifest.step,
            "world_size": manifest.world_size,
            **manifest.written_by,
            "aliases": dict(manifest.aliases),
            "per_rank": tuple(manifest.per_rank),
        }

    @property
    def nbytes_read(self) -> int:
        """The bytes that were read of the ranks' files so far."""
        return self._nbytes_read_of_closed + sum(file.nbytes_read for file in self._open.values())

    def read(self, path: str, span: Span) -> Iterator[Tensor]:
        """Return the elements `span`, verified. Memory: a chunk, and itself if it is not stored in row-major order."""
        record = self.record(path)
        if record.stride is None:
            yield from self.read_stored(path, span)
            return
        info = record.info
        held = torch.empty(info.numel, dtype=info.dtype, device="cpu")
        whole = filled(held, self.read_stored(path, Span(0, info.numel))).as_strided(info.shape, record.stride)
        yield from read_boxes(info, span, lambda box, out: out.copy_(box.of(whole)))

    def read_stored(self, path: str, span: Span) -> Iterator[Tensor]:
        """Like `read`, with elements counted in the memory order in which the tensor is stored."""
        record = self.record(path)
        if not Span(0, record.info.numel).contains(span):
            raise ValueError(f"{path!r} has {record.info.numel} elements, and not [{span.start}, {span.stop})")
        if record.inline is not None:
            yield tensor_of(bytearray(record.inline), record.info.dtype)[span.as_slice()]
            return
        end = span.start
        for piece in record.pieces:
            wanted = piece.span.overlap(span)
            if wanted:
                yield from _zeros(Span(end, wanted.start), record.info.dtype)
                yield from self._read_piece(path, record, piece, wanted.relative_to(piece.span.start))
                end = wanted.stop
        yield from _zeros(Span(end, span.stop), record.info.dtype)

    def record(self, path: str) -> TensorRecord:
        """Return the record of the tensor `path`; a KeyError if there is none."""
        manifest = self.manifest
        return manifest.tensors[manifest.aliases.get(path, path)]

    def load(self, path: str) -> Tensor:
        """Return the whole tensor `path`, in its shape, row-major, in memory of its own."""
        record = self.record(path)
        info = record.info
        for piece in record.pieces:
            # This checks that the bytes are there, before anything is allocated.
            self.file(piece.file)
        result = torch.empty(info.numel, dtype=info.dtype, device="cpu")
        return filled(result, self.read(path, Span(0, info.numel))).reshape(info.shape)

    def decode(self, tree: Any, *, tensors: bool = True) -> Any:
        """Return the value of an encoded tree, with its tensors (on the CPU), or without.

        Raises:
            CheckpointError: if the tree is not sound.
        """
        try:
            return decode(tree, self.load if tensors else lambda _: OMIT)
        except (ValueError, KeyError, RecursionError) as error:
            path = self.path / MANIFEST
            raise CheckpointError(f"{path}: its values are not sound: {error}", path=path) from error

    def _read_piece(self, path: str, record: TensorRecord, piece: FilePiece, wanted: Span) -> Iterator[Tensor]:
        """Elements `wanted` of a piece, block by block, up to a chunk at once."""
        itemsize = record.info.dtype.itemsize
        nbytes, start, stop = piece.span.numel * itemsize, wanted.start * itemsize, wanted.stop * itemsize
        first = start // BLOCK_NBYTES
        last = -(-stop // BLOCK_NBYTES)
        step = CHUNK_NBYTES // BLOCK_NBYTES
        for block in range(first, last, step):
            begin = block * BLOCK_NBYTES
            end = min(min(block + step, last) * BLOCK_NBYTES, nbytes)
            data = self.file(piece.file).read(piece.offset + begin, end - begin)
            self._verify(path, piece, block, data)
            self.observe(len(data))
            tensor = tensor_of(data, record.info.dtype)
            inside = Span(max(start, begin), min(stop, end)).relative_to(begin)
            yield tensor[inside.start // itemsize : inside.stop // itemsize]

    def _verify(self, path: str, piece: FilePiece, block: int, data: bytearray) -> None:
        view = memoryview(data)
        for number, begin in enumerate(range(0, len(data), BLOCK_NBYTES), block):
            found = xxhash.xxh3_128_hexdigest(view[begin : begin + BLOCK_NBYTES])
            if found != piece.hashes[number]:
                file = self.path / self.manifest.files[piece.file].name
                raise CheckpointError(
                    f"{file}: block {number} of {path!r} is not what rank {piece.file} wrote: expected hash "
                    f"{piece.hashes[number]}, found {found}",
                    path=file,
                    fqn=path,
                    rank=piece.file,
                    hint=_HINT,
                )

    def file(self, number: int) -> ByteFile:
        """Return the file of rank `number`, open until a few others were asked for; it is checked the first time."""
        found = self._open.get(number)
        if found is None:
            found = self._open[number] = self._opened(number)
            if len(self._open) > OPEN_FILES.value:
                _, oldest = self._open.popitem(last=False)
                self._nbytes_read_of_closed += oldest.nbytes_read
                oldest.close()
        self._open.move_to_end(number)
        return found

    def _opened(self, number: int) -> ByteFile:
        record = self.manifest.files[number]
        try:
            file = ByteFile(self.path / record.name)
        except CheckpointError as error:
            raise (self.deletion() or error) from error
        if number not in self._checked:
            try:
                _check_file(file, record, self.manifest, number)
            except BaseException:
                file.close()
                raise
            self._checked.add(number)
        return file


def _check_file(file: ByteFile, record: FileRecord, manifest: Manifest, rank: int) -> None:
    expected = f"the file that rank {rank} of {manifest.world_size} wrote in save {manifest.save_id}"
    if file.nbytes != record.nbytes:
        problem = f"expected {record.nbytes:,} bytes, found {file.nbytes:,}: not {expected}"
    elif xxhash.xxh3_128_hexdigest(file.read(0, record.header_nbytes)) != record.header_hash:
        problem = f"its header is not that of {expected}"
    else:
        return
    problem += what_it_says(file.path)
    raise CheckpointError(f"{file.path}: {problem}", path=file.path, rank=rank, hint=_HINT)


def what_it_says(path: Path) -> str:
    """Return the words of an error about a wrong file that tell what the file says that it is, if it says anything."""
    try:
        said = read_header(path).metadata
    except CheckpointError:
        return ""
    if "save_id" not in said:
        return ""
    return f"; it says that it is of rank {said.get('rank')} of {said.get('world_size')} in save {said['save_id']}"


def _zeros(span: Span, dtype: torch.dtype) -> Iterator[Tensor]:
    for part in chunk_spans(span, dtype.itemsize):
        yield torch.zeros(part.numel, dtype=dtype, device="cpu")
