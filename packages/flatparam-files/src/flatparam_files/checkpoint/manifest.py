"""The manifest: everything that is known of a checkpoint but the tensors' bytes, and where in which file these are.

A record is validated when it is built; a ValueError names the field and its value.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Final, final

import attrs
import torch
from typing_extensions import Self

from flatparam_core import Span
from flatparam_files.checkpoint.fields import (
    Field,
    as_count,
    as_list,
    as_object,
    as_text,
    bad_value,
    count,
    dtype_name,
    dtype_named,
    hash_digits,
    instance_of,
    json_tree,
    mapping_of,
    text,
    tuple_of,
)
from flatparam_files.disk.source import TensorInfo, join_path, split_path

BLOCK_NBYTES: Final = 2**20
"""The bytes that one hash is of. Blocks begin anew at each piece."""

_DIGITS_OF_A_HASH: Final = 32
_RANK_FILE: Final = re.compile(r"rank-\d{5,}\.safetensors")
_SHORTEST_HEADER: Final = 10


def rank_file(rank: int) -> str:
    """Return the name of the file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


def block_count(nbytes: int) -> int:
    """Return how many blocks a piece of `nbytes` has."""
    return -(-nbytes // BLOCK_NBYTES)


@final
@attrs.frozen
class FilePiece:
    """Elements `span` (in memory order) of a tensor: the bytes of file `file` from `offset` on."""

    file: int = attrs.field(validator=count)
    offset: int = attrs.field(validator=count)
    span: Span = attrs.field(validator=instance_of(Span))
    hashes: tuple[str, ...] = attrs.field(validator=tuple_of(hash_digits))
    """XXH3-128 of each block, in hexadecimal."""

    def to_json(self) -> list[Any]:
        """`[file, offset, start, stop, hashes joined]`."""
        return [self.file, self.offset, self.span.start, self.span.stop, "".join(self.hashes)]

    @classmethod
    def from_json(cls, tree: Any) -> Self:
        """Return the piece of which `to_json` made `tree`; a ValueError says what is wrong."""
        file, offset, start, stop, joined = as_list(tree, 5)
        hashes = re.findall(f".{{1,{_DIGITS_OF_A_HASH}}}", as_text(joined), re.DOTALL)
        return cls(file, offset, _span(start, stop), tuple(hashes))


def _span(start: Any, stop: Any) -> Span:
    if as_count(start) > as_count(stop):
        raise ValueError(f"expected a span, found one that begins at {start} and ends at {stop}")
    return Span(start, stop)


@final
@attrs.frozen
class TensorRecord:
    """A tensor, and where its elements are.

    `stride` (in elements) is that of its memory order if that is not row-major. `whole` says of an optimizer's state
    that it belongs to its parameter as a whole, like a step counter, whatever its shape. `inline` are the bytes of a
    small tensor, which then has no pieces. The elements of a tensor that are in no piece are zero.
    """

    info: TensorInfo = attrs.field(validator=instance_of(TensorInfo))
    pieces: tuple[FilePiece, ...] = attrs.field(default=(), validator=tuple_of(instance_of(FilePiece)))
    stride: tuple[int, ...] | None = attrs.field(default=None)
    whole: bool = attrs.field(default=False, validator=instance_of(bool))
    inline: bytes | None = attrs.field(default=None)

    @info.validator
    def _check_info(self, field: Field, info: TensorInfo) -> None:
        tuple_of(count)(self, field, info.shape)
        instance_of(torch.dtype)(self, field, info.dtype)

    @pieces.validator
    def _check_pieces(self, field: Field, pieces: tuple[FilePiece, ...]) -> None:
        """Refuse pieces that overlap, that lie outside, or that have too many or too few hashes."""
        end = 0
        for piece in pieces:
            if piece.span.start < end or piece.span.stop > self.info.numel:
                raise ValueError(
                    f"TensorRecord.pieces: elements [{piece.span.start}, {piece.span.stop}) of {self.info.numel} "
                    "occur twice or not at all"
                )
            end = piece.span.stop
            blocks = block_count(piece.span.numel * self.info.dtype.itemsize)
            if len(piece.hashes) != blocks:
                raise bad_value(self, field, len(piece.hashes), f"{blocks} hashes of a piece")

    @stride.validator
    def _check_stride(self, field: Field, stride: tuple[int, ...] | None) -> None:
        if stride is None:
            return
        tuple_of(count)(self, field, stride)
        if len(stride) != len(self.info.shape):
            raise bad_value(self, field, stride, f"a stride for each dimension of {self.info.shape}")
        expected = 1
        for step, size in sorted(zip(stride, self.info.shape, strict=True)):
            if size != 1 and step != expected:
                raise bad_value(self, field, stride, f"strides that lay shape {self.info.shape} out densely")
            expected *= size

    @inline.validator
    def _check_inline(self, field: Field, inline: bytes | None) -> None:
        if inline is None:
            return
        instance_of(bytes)(self, field, inline)
        if self.pieces or len(inline) != self.info.nbytes:
            raise bad_value(self, field, inline, f"{self.info.nbytes} bytes inline and no pieces")

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON."""
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
        """Return the record of which `to_json` made `tree`; a ValueError says what is wrong."""
        tree = as_object(tree)
        shape = [as_count(size) for size in as_list(tree["shape"])]
        info = TensorInfo(shape, dtype_named(as_text(tree["dtype"])))
        pieces = tuple(FilePiece.from_json(piece) for piece in as_list(tree["pieces"]))
        stride, inline = tree.get("stride"), tree.get("inline")
        return cls(
            info,
            pieces,
            None if stride is None else tuple(as_list(stride)),
            tree.get("whole", False) is True,
            None if inline is None else base64.b64decode(as_text(inline), validate=True),
        )

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
class RankValue:
    """The value that one rank has of a state that differs between ranks and is not cut like its parameter.

    `span` is the rank's part of the parameter; `value` a tree of `values.encode`, whose tensors are in the manifest.
    """

    rank: int = attrs.field(validator=count)
    span: Span = attrs.field(validator=instance_of(Span))
    value: Any = attrs.field(validator=json_tree)

    def to_json(self) -> list[Any]:
        """`[rank, start, stop, value]`."""
        return [self.rank, self.span.start, self.span.stop, self.value]

    @classmethod
    def from_json(cls, tree: Any) -> Self:
        """Return the record of which `to_json` made `tree`; a ValueError says what is wrong."""
        rank, start, stop, value = as_list(tree, 4)
        return cls(rank, _span(start, stop), value)


@final
@attrs.frozen
class FileRecord:
    """A file: its size, and the XXH3-128 of its header (the bytes before those of the tensors)."""

    name: str = attrs.field()
    nbytes: int = attrs.field(validator=count)
    header_nbytes: int = attrs.field(validator=count)
    header_hash: str = attrs.field(validator=hash_digits)

    @name.validator
    def _check_name(self, field: Field, name: Any) -> None:
        if not isinstance(name, str) or not _RANK_FILE.fullmatch(name):
            raise bad_value(self, field, name, f"a name like {rank_file(0)}")

    @header_nbytes.validator
    def _check_header_nbytes(self, field: Field, header_nbytes: int) -> None:
        if not _SHORTEST_HEADER <= header_nbytes <= self.nbytes:
            raise bad_value(
                self, field, header_nbytes, f"a header of at least {_SHORTEST_HEADER} of {self.nbytes} bytes"
            )

    def to_json(self) -> list[Any]:
        """`[name, nbytes, header_nbytes, header_hash]`."""
        return [self.name, self.nbytes, self.header_nbytes, self.header_hash]

    @classmethod
    def from_json(cls, tree: Any, rank: int) -> Self:
        """Return the record of which `to_json` made `tree`, of the file of `rank`; a ValueError says what is wrong."""
        name, nbytes, header_nbytes, header_hash = as_list(tree, 4)
        if name != rank_file(rank):
            raise ValueError(f"file {rank} must be called {rank_file(rank)}, found {str(name)[:60]!r}")
        return cls(name, nbytes, header_nbytes, header_hash)


# The manifest itself


FORMAT: Final = "flatparam checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
OF_RANKS: Final = "per_rank"
"""The first part of the paths of tensors that are only the values of a `RankValue`."""
EXTRA_STATE: Final = "_extra_state"
"""The name of the entry of `get_extra_state` in torch's state dicts."""


@final
@attrs.frozen
class Manifest:
    """Everything that is known of a checkpoint but the tensors' bytes. A ValueError says if it contradicts itself."""

    save_id: str = attrs.field(validator=hash_digits)
    step: int = attrs.field(validator=count)
    follows: str | None = attrs.field(validator=attrs.validators.optional(text))
    """The save id that `latest` named when this was saved."""
    files: tuple[FileRecord, ...] = attrs.field(validator=tuple_of(instance_of(FileRecord)))
    tensors: Mapping[str, TensorRecord] = attrs.field(validator=mapping_of(instance_of(TensorRecord)))
    per_rank: Mapping[str, tuple[RankValue, ...]] = attrs.field(validator=mapping_of(tuple_of(instance_of(RankValue))))
    """States that differ between ranks and are not cut like their parameter, by path."""
    aliases: Mapping[str, str] = attrs.field(validator=mapping_of(text))
    """The other paths of tied tensors."""
    values: Any = attrs.field(validator=json_tree)
    written_by: Mapping[str, str] = attrs.field(validator=mapping_of(text))
    number: int = attrs.field(default=0, validator=count)
    """Saves of one directory are numbered from 1; the newest has the largest number, whatever clocks say."""

    @files.validator
    def _check_files(self, field: Field, files: tuple[FileRecord, ...]) -> None:
        names = [file.name for file in files]
        if not files or names != [rank_file(rank) for rank in range(len(files))]:
            raise bad_value(self, field, names, "a file of each rank")

    @tensors.validator
    def _check_tensors(self, field: Field, tensors: Mapping[str, TensorRecord]) -> None:
        for path, record in tensors.items():
            _check_bytes(path, record, self.files)
            if record.gaps and not _may_lack_elements(path, record, tensors):
                raise ValueError(f"Manifest.tensors: {path!r} lacks the elements {record.gaps[0]}")

    @aliases.validator
    def _check_aliases(self, field: Field, aliases: Mapping[str, str]) -> None:
        for alias, path in aliases.items():
            if path not in self.tensors:
                raise bad_value(self, field, path, f"a tensor that {alias!r} stands for")

    @property
    def world_size(self) -> int:
        """How many ranks have written."""
        return len(self.files)

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "save_id": self.save_id,
            "step": self.step,
            "follows": self.follows,
            "number": self.number,
            "world_size": self.world_size,
            "written_by": dict(self.written_by),
            "files": [file.to_json() for file in self.files],
            "tensors": {path: record.to_json() for path, record in self.tensors.items()},
            "per_rank": {path: [each.to_json() for each in values] for path, values in self.per_rank.items()},
            "aliases": dict(self.aliases),
            "values": self.values,
        }

    @classmethod
    def from_json(cls, tree: Any) -> Self:
        """Return the manifest of which `to_json` made `tree`; a ValueError says what is wrong, and where."""
        tree = as_object(tree)
        if tree.get("format") != FORMAT or tree.get("version") != VERSION:
            raise ValueError(
                f"expected {FORMAT!r} version {VERSION}, found {tree.get('format')!r} version {tree.get('version')!r}"
            )
        try:
            return cls._from_entries(tree)
        except KeyError as error:
            raise ValueError(f"expected the field {error}, found none") from error

    @classmethod
    def _from_entries(cls, tree: dict[str, Any]) -> Self:
        files = tuple(FileRecord.from_json(file, rank) for rank, file in enumerate(as_list(tree["files"])))
        if len(files) != tree["world_size"]:
            raise ValueError(f"expected as many files as ranks, found {len(files)} and {tree['world_size']}")
        return cls(
            tree["save_id"],
            tree["step"],
            tree["follows"],
            files,
            {path: _record(path, record) for path, record in as_object(tree["tensors"]).items()},
            {
                path: tuple(RankValue.from_json(value) for value in as_list(values))
                for path, values in as_object(tree["per_rank"]).items()
            },
            as_object(tree["aliases"]),
            tree["values"],
            as_object(tree["written_by"]),
            # Manifests of the first versions have none.
            tree.get("number", 0),
        )


def _record(path: str, tree: Any) -> TensorRecord:
    try:
        return TensorRecord.from_json(tree)
    except (ValueError, KeyError) as error:
        raise ValueError(f"the record of tensor {path!r}: {error}") from error


def _check_bytes(path: str, record: TensorRecord, files: tuple[FileRecord, ...]) -> None:
    """Check that the bytes of each piece are behind the header of a file that is there."""
    for piece in record.pieces:
        if piece.file >= len(files):
            raise ValueError(f"tensor {path!r}: expected the file {piece.file} in the manifest, found none")
        file = files[piece.file]
        end = piece.offset + piece.span.numel * record.info.dtype.itemsize
        if piece.offset < file.header_nbytes or end > file.nbytes:
            raise ValueError(
                f"tensor {path!r}: bytes [{piece.offset}, {end}) are not in {file.name} of {file.nbytes} bytes"
            )


def _may_lack_elements(path: str, record: TensorRecord, tensors: Mapping[str, TensorRecord]) -> bool:
    """Only the state of a parameter that is there may lack elements: so nobody allocates more than there are bytes."""
    parts = split_path(path)
    parameter = tensors.get(join_path(("model", parts[-2]))) if len(parts) > 2 else None
    return (
        parts[0] == "optimizer"
        and parameter is not None
        and parameter.info.shape == record.info.shape
        and not record.whole
    )
