"""What a checkpoint consists of: which bytes of which file are which elements of which tensor."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
from typing_extensions import Self, final

from flatparam_runtime import Span
from flatparam_state.checkpoint.manifest.dtypes import dtype_name, dtype_named
from flatparam_state.source import TensorInfo, join_path, split_path

__all__ = [
    "BLOCK_NBYTES",
    "FORMAT",
    "MANIFEST",
    "VERSION",
    "Copy",
    "FileRecord",
    "Manifest",
    "Piece",
    "TensorRecord",
    "block_count",
    "merged_tensors",
    "rank_file",
]

FORMAT: Final = "flatparam checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
BLOCK_NBYTES: Final = 2**20
"""What is hashed at once. Blocks begin anew at each piece."""

_HASH: Final = re.compile(r"[0-9a-f]{32}")
_SAVE_ID: Final = re.compile(r"[0-9a-f]{32}")


def rank_file(rank: int) -> str:
    """The name of the file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


def block_count(nbytes: int) -> int:
    """How many blocks a piece of `nbytes` has."""
    return -(-nbytes // BLOCK_NBYTES)


@final
@attrs.frozen
class Piece:
    """Elements `span` (in memory order) of a tensor: the bytes of file `file` from `offset` on."""

    file: int
    offset: int
    span: Span
    hashes: tuple[str, ...]
    """XXH3-128 of each block, in hexadecimal."""

    def to_json(self) -> list[Any]:
        """`[file, offset, start, stop, hashes joined]`."""
        return [self.file, self.offset, self.span.start, self.span.stop, "".join(self.hashes)]

    @classmethod
    def from_json(cls, tree: Any, itemsize: int) -> Self:
        """See `to_json`; a ValueError says what is wrong."""
        file, offset, start, stop, hashes = _list(tree, 5)
        for number in (file, offset, start, stop):
            _number(number)
        if start > stop:
            raise ValueError(f"a piece begins at {start} and ends at {stop}")
        count = block_count((stop - start) * itemsize)
        found = tuple(_HASH.findall(_string(hashes)))
        if len(found) != count or len(hashes) != 32 * count:
            raise ValueError(f"expected {count} hashes of a piece")
        return cls(file, offset, Span(start, stop), found)


@final
@attrs.frozen
class TensorRecord:
    """A tensor, and where its elements are.

    `stride` (in elements) is that of its memory order where that is not row-major. `whole` says of an optimizer's
    state that it belongs to its parameter as a whole, like a step counter, whatever its shape. `inline` are the bytes
    of a small tensor, which then has no pieces. Other elements in no piece are zero.
    """

    info: TensorInfo
    pieces: tuple[Piece, ...] = ()
    stride: tuple[int, ...] | None = None
    whole: bool = False
    inline: bytes | None = None

    def to_json(self) -> dict[str, Any]:
        """A dict for JSON."""
        tree: dict[str, Any] = {"dtype": dtype_name(self.info.dtype), "shape": list(self.info.shape)}
        if self.stride is not None:
            tree["stride"] = list(self.stride)
        if self.whole:
            tree["whole"] = True
        if self.inline is not None:
            tree["inline"] = base64.b64encode(self.inline).decode()
        return {**tree, "pieces": [piece.to_json() for piece in self.pieces]}

    @classmethod
    def from_json(cls, tree: Any) -> Self:
        """See `to_json`; a ValueError says what is wrong."""
        tree = _dict(tree)
        info = TensorInfo(
            [_number(size) for size in _list(tree["shape"])], dtype_named(_string(tree["dtype"]))
        )
        pieces = tuple(Piece.from_json(piece, info.dtype.itemsize) for piece in _list(tree["pieces"]))
        stride = tree.get("stride")
        if stride is not None:
            stride = tuple(_number(step) for step in _list(stride, len(info.shape)))
            order = sorted((step, size) for step, size in zip(stride, info.shape, strict=True) if size != 1)
            expected = 1
            for step, size in order:
                if step != expected:
                    raise ValueError(f"strides {stride} do not lay shape {info.shape} out densely")
                expected *= size
        inline = tree.get("inline")
        if inline is not None:
            inline = base64.b64decode(_string(inline), validate=True)
            if pieces or len(inline) != info.nbytes:
                raise ValueError(f"expected {info.nbytes} bytes inline and no pieces")
        record = cls(info, pieces, stride, tree.get("whole", False) is True, inline)
        record.check()
        return record

    def check(self) -> None:
        """Raise ValueError where pieces overlap or lie outside."""
        end = 0
        for piece in self.pieces:
            if piece.span.start < end or piece.span.stop > self.info.numel:
                raise ValueError(
                    f"elements [{piece.span.start}, {piece.span.stop}) of {self.info.numel} occur twice or not at all"
                )
            end = piece.span.stop

    @property
    def gaps(self) -> tuple[Span, ...]:
        """The elements that are nowhere."""
        if self.inline is not None:
            return ()
        ends = [0, *(piece.span.stop for piece in self.pieces)]
        starts = [*(piece.span.start for piece in self.pieces), self.info.numel]
        return tuple(Span(end, start) for end, start in zip(ends, starts, strict=True) if start > end)


@final
@attrs.frozen
class Copy:
    """What one rank has of a state that is not cut like its parameter, and differs between ranks.

    `span` is the rank's part of the parameter; `value` a tree of `values.encode`, whose tensors are in the manifest.
    """

    rank: int
    span: Span
    value: Any

    def to_json(self) -> list[Any]:
        """`[rank, start, stop, value]`."""
        return [self.rank, self.span.start, self.span.stop, self.value]

    @classmethod
    def from_json(cls, tree: Any) -> Self:
        """See `to_json`; a ValueError says what is wrong."""
        rank, start, stop, value = _list(tree, 4)
        if _number(start) > _number(stop):
            raise ValueError(f"a fragment begins at {start} and ends at {stop}")
        return cls(_number(rank), Span(start, stop), value)


@final
@attrs.frozen
class FileRecord:
    """A file: its size, and the XXH3-128 of its header (the bytes before those of the tensors)."""

    name: str
    nbytes: int
    header_nbytes: int
    header_hash: str

    def to_json(self) -> list[Any]:
        """`[name, nbytes, header_nbytes, header_hash]`."""
        return [self.name, self.nbytes, self.header_nbytes, self.header_hash]

    @classmethod
    def from_json(cls, tree: Any, rank: int) -> Self:
        """See `to_json`; a ValueError says what is wrong."""
        name, nbytes, header_nbytes, header_hash = _list(tree, 4)
        if name != rank_file(rank) or not _HASH.fullmatch(_string(header_hash)):
            raise ValueError(f"file {rank} must be called {rank_file(rank)} and have a hash")
        if not 10 <= _number(header_nbytes) <= _number(nbytes):
            raise ValueError(f"{name}: a header of {header_nbytes} bytes in a file of {nbytes}")
        return cls(name, nbytes, header_nbytes, header_hash)


@final
@attrs.frozen
class Manifest:
    """Everything that is known of a checkpoint but the tensors' bytes."""

    save_id: str
    step: int
    follows: str | None
    """The save id that `latest` named when this was saved."""
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    per_rank: Mapping[str, tuple[Copy, ...]]
    """States that differ between ranks and are not cut like their parameter, by path."""
    aliases: Mapping[str, str]
    """The other paths of tied tensors."""
    values: Any
    written_by: Mapping[str, str]

    @property
    def world_size(self) -> int:
        """How many ranks have written."""
        return len(self.files)

    def to_json(self) -> dict[str, Any]:
        """A dict for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "save_id": self.save_id,
            "step": self.step,
            "follows": self.follows,
            "world_size": self.world_size,
            "written_by": dict(self.written_by),
            "files": [file.to_json() for file in self.files],
            "tensors": {path: record.to_json() for path, record in self.tensors.items()},
            "per_rank": {path: [copy.to_json() for copy in copies] for path, copies in self.per_rank.items()},
            "aliases": dict(self.aliases),
            "values": self.values,
        }

    @classmethod
    def from_json(cls, tree: Any) -> Self:
        """See `to_json`; a ValueError says what is wrong, and where."""
        tree = _dict(tree)
        if tree.get("format") != FORMAT or tree.get("version") != VERSION:
            raise ValueError(
                f"expected {FORMAT!r} version {VERSION}, found {tree.get('format')!r} version {tree.get('version')!r}"
            )
        try:
            return cls._from_fields(tree)
        except KeyError as error:
            raise ValueError(f"it lacks {error}") from error

    @classmethod
    def _from_fields(cls, tree: dict[str, Any]) -> Self:
        follows = tree["follows"]
        if not _SAVE_ID.fullmatch(_string(tree["save_id"])) or not (
            follows is None or isinstance(follows, str)
        ):
            raise ValueError("the save id is none")
        files = tuple(FileRecord.from_json(file, rank) for rank, file in enumerate(_list(tree["files"])))
        if not files or len(files) != tree["world_size"]:
            raise ValueError(f"expected as many files as ranks, found {len(files)} and {tree['world_size']}")
        tensors = {path: _record(path, record, files) for path, record in _dict(tree["tensors"]).items()}
        _check_gaps(tensors)
        per_rank = {
            path: tuple(Copy.from_json(copy) for copy in _list(copies))
            for path, copies in _dict(tree["per_rank"]).items()
        }
        aliases = {alias: _string(path) for alias, path in _dict(tree["aliases"]).items()}
        if not tensors.keys() >= set(aliases.values()):
            raise ValueError("an alias stands for no tensor")
        written_by = {key: _string(value) for key, value in _dict(tree["written_by"]).items()}
        step = _number(tree["step"])
        return cls(
            tree["save_id"], step, follows, files, tensors, per_rank, aliases, tree["values"], written_by
        )


def _check_gaps(tensors: Mapping[str, TensorRecord]) -> None:
    """Only the state of a parameter that is there may lack elements: so nobody allocates more than there are bytes."""
    for path, record in tensors.items():
        if record.gaps:
            parts = split_path(path)
            model = tensors.get(join_path(("model", parts[-2]))) if len(parts) > 2 else None
            if (
                parts[0] != "optimizer"
                or model is None
                or model.info.shape != record.info.shape
                or record.whole
            ):
                raise ValueError(f"{path!r} lacks the elements {record.gaps[0]}")


def _record(path: str, tree: Any, files: tuple[FileRecord, ...]) -> TensorRecord:
    try:
        record = TensorRecord.from_json(tree)
        for piece in record.pieces:
            if piece.file >= len(files):
                raise ValueError(f"there is no file {piece.file}")
            file = files[piece.file]
            end = piece.offset + piece.span.numel * record.info.dtype.itemsize
            if piece.offset < file.header_nbytes or end > file.nbytes:
                raise ValueError(
                    f"bytes [{piece.offset}, {end}) are not in {file.name} of {file.nbytes} bytes"
                )
    except (ValueError, KeyError) as error:
        raise ValueError(f"tensor {path!r}: {error}") from error
    return record


def merged_tensors(parts: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """The tensors of which `parts` are the pieces.

    Raises:
        ValueError: where two parts do not belong to one tensor, naming it.
    """
    found: dict[str, TensorRecord] = {}
    for path, part in parts:
        known = found.setdefault(path, attrs.evolve(part, pieces=()))
        if attrs.evolve(part, pieces=()) != attrs.evolve(known, pieces=()):
            raise ValueError(f"{path!r} is {part.info} on one rank and {known.info} on another")
        found[path] = attrs.evolve(known, pieces=known.pieces + part.pieces)
    for path, record in found.items():
        record = attrs.evolve(record, pieces=tuple(sorted(record.pieces, key=lambda piece: piece.span)))
        found[path] = record
        try:
            record.check()
        except ValueError as error:
            raise ValueError(
                f"{path!r}: {error}; ranks that do not share one model need a directory of their own each"
            ) from error
    return found


def _dict(tree: Any) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise ValueError(f"expected an object, found {str(tree)[:60]!r}")
    return tree


def _list(tree: Any, length: int | None = None) -> list[Any]:
    if not isinstance(tree, list) or (length is not None and len(tree) != length):
        raise ValueError(f"expected a list of {length or 'any'} items, found {str(tree)[:60]!r}")
    return tree


def _string(tree: Any) -> str:
    if not isinstance(tree, str):
        raise ValueError(f"expected a string, found {str(tree)[:60]!r}")
    return tree


def _number(tree: Any) -> int:
    if type(tree) is not int or not 0 <= tree < 2**63:
        raise ValueError(f"expected a number of at least 0, found {str(tree)[:60]!r}")
    return tree
