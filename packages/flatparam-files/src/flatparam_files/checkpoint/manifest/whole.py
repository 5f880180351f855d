"""The manifest: everything that is known of a checkpoint but the tensors' bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import attrs
from typing_extensions import Self

from flatparam_files.checkpoint.manifest.fields import (
    as_list,
    as_object,
    bad_value,
    count,
    hash_digits,
    instance_of,
    json_tree,
    mapping_of,
    text,
    tuple_of,
)
from flatparam_files.checkpoint.manifest.records import FileRecord, RankValue, TensorRecord, rank_file
from flatparam_files.disk import join_path, split_path

__all__ = ["EXTRA_STATE", "FORMAT", "MANIFEST", "Manifest", "OF_RANKS", "VERSION"]

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
    per_rank: Mapping[str, tuple[RankValue, ...]] = attrs.field(
        validator=mapping_of(tuple_of(instance_of(RankValue)))
    )
    """States that differ between ranks and are not cut like their parameter, by path."""
    aliases: Mapping[str, str] = attrs.field(validator=mapping_of(text))
    """The other paths of tied tensors."""
    values: Any = attrs.field(validator=json_tree)
    written_by: Mapping[str, str] = attrs.field(validator=mapping_of(text))
    number: int = attrs.field(default=0, validator=count)
    """Saves of one directory are numbered from 1; the newest has the largest number, whatever clocks say."""

    @files.validator
    def _check_files(
        self, field: attrs.Attribute[tuple[FileRecord, ...]], files: tuple[FileRecord, ...]
    ) -> None:
        names = [file.name for file in files]
        if not files or names != [rank_file(rank) for rank in range(len(files))]:
            raise bad_value(self, field, names, "a file of each rank")

    @tensors.validator
    def _check_tensors(
        self, field: attrs.Attribute[Mapping[str, TensorRecord]], tensors: Mapping[str, TensorRecord]
    ) -> None:
        for path, record in tensors.items():
            _check_bytes(path, record, self.files)
            if record.gaps and not _may_lack_elements(path, record, tensors):
                raise ValueError(f"Manifest.tensors: {path!r} lacks the elements {record.gaps[0]}")

    @aliases.validator
    def _check_aliases(self, field: attrs.Attribute[Mapping[str, str]], aliases: Mapping[str, str]) -> None:
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
