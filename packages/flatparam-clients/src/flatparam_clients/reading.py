"""What torch.distributed.checkpoint reads: one checkpoint on all ranks, though each opens a path of its own."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import attrs

from flatparam.addons import load
from flatparam.compat.patching import Patch

__all__ = ["patches_of_reader"]


@final
@attrs.frozen
class _Source:
    """The checkpoint that one rank reads, as its local plan tells the coordinator."""

    path: str
    digest: str | None
    """Of its metadata; None if this rank has none there, as on a disk that ranks do not share."""


def patches_of_reader() -> Iterator[Patch]:
    """Yield the patches by which torch's reader compares the checkpoints that ranks read.

    The first rank reads the metadata, and each rank the files beside its own: of two checkpoints, the model would be a
    mixture. A trainer that chooses the best one on each rank by itself may choose differently.
    """
    reader = importlib.import_module("torch.distributed.checkpoint.filesystem").FileSystemReader
    local, everywhere = reader.prepare_local_plan, reader.prepare_global_plan

    @functools.wraps(local)
    def prepare_local_plan(self: Any, plan: Any) -> Any:
        return dataclasses.replace(local(self, plan), storage_data=_source_of(self))

    @functools.wraps(everywhere)
    def prepare_global_plan(self: Any, plans: list[Any]) -> Any:
        _check_one([plan.storage_data for plan in plans])
        return everywhere(self, [dataclasses.replace(plan, storage_data=None) for plan in plans])

    yield Patch(reader, "prepare_local_plan", prepare_local_plan)
    yield Patch(reader, "prepare_global_plan", prepare_global_plan)


def _source_of(reader: Any) -> _Source:
    try:
        with reader.fs.create_stream(reader.fs.concat_path(reader.path, ".metadata"), "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except Exception:  # whatever a file system of others raises; torch's own reading says what is wrong
        digest = None
    return _Source(str(reader.path), digest)


def _check_one(sources: Sequence[object]) -> None:
    """Check that all ranks read one checkpoint; torch raises the error on every rank.

    Raises:
        CheckpointError: naming the first rank that reads another one than rank 0.
    """
    known = [
        (rank, each)
        for rank, each in enumerate(sources)
        if isinstance(each, _Source) and each.digest is not None
    ]
    for rank, other in known[1:]:
        first_rank, first = known[0]
        if other.digest != first.digest:
            raise load("flatparam_files").CheckpointError(
                f"rank {rank} loads the checkpoint {other.path}, and rank {first_rank} loads {first.path}, which is a "
                "different one: the model would be a mixture",
                rank=rank,
                path=other.path,
                hint="have one rank choose, and tell the others: broadcast the path before load()",
            )
