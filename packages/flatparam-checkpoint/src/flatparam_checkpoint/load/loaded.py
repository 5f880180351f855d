"""The result of a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import attrs

from flatparam_files import CheckpointError, CheckpointReader
from flatparam_files.checkpoint import Manifest, read_manifest

__all__ = ["Loaded", "rank_extra_of"]


@final
@attrs.frozen(eq=False)
class Loaded:
    """Everything that was loaded beside the model and the optimizer."""

    step: int
    extra: Any
    """The `extra` that was given to `save`; tensors are on the CPU."""
    rank_extra: Any
    """This rank's own, or None if the checkpoint is of a different world size."""
    world_size: int
    """The world size of the save."""
    save_id: str
    nbytes_read: int
    """The bytes that this rank has read of the ranks' files: a header for each file, and the blocks that it needs."""
    missing: tuple[str, ...]
    """Names in the model that the checkpoint lacks (with `strict=False`)."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint that the model lacks (with `strict=False`)."""
    _path: Path

    def of_rank(self, rank: int) -> Any:
        """Return the `rank_extra` of any rank of the save; None if it gave none.

        Raises:
            CheckpointError: if it cannot be read any more, or there was no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise CheckpointError(
                f"{self._path} is of {self.world_size} ranks: there was no rank {rank}", path=self._path
            )
        with CheckpointReader(self._path, read_manifest(self._path)) as reader:
            return rank_extra_of(reader, reader.manifest, rank)


def rank_extra_of(reader: CheckpointReader, manifest: Manifest, rank: int) -> Any:
    """Return the `rank_extra` that `rank` gave; None if it gave none."""
    return reader.decode(manifest.values.get("rank_extra", {}).get(str(rank)))
