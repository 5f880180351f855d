"""The report of a rank that has written its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import attrs
from typing_extensions import Self

from flatparam_files.checkpoint.manifest import FileRecord, RankValue, TensorRecord, read_sealed, seal
from flatparam_files.checkpoint.moments import Moment, OnMoment, nothing
from flatparam_files.disk import CheckpointError, new_file

__all__ = ["RankReport", "report_path"]

_ONE_DIRECTORY: Final = (
    "all ranks must see one and the same directory: name one on a file system that all hosts share"
)


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
        """The report of `rank` in `directory`.

        Raises:
            CheckpointError: if it is not there, or of a different save, or the file is not as it says.
        """
        path = report_path(directory, rank)
        if not path.exists():
            raise CheckpointError(
                f"{path}: rank {rank} wrote this file, rank 0 finds none",
                path=path,
                rank=rank,
                hint=_ONE_DIRECTORY,
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
    """The path of the report of rank `rank`."""
    return directory / f"rank-{rank:05d}.done"
