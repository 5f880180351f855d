"""Writing a checkpoint from one process, tensor by tensor: for conversions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_core import Span
from flatparam_files.checkpoint.commit import Committer
from flatparam_files.checkpoint.directory import CheckpointDirectory
from flatparam_files.checkpoint.fields import check_step, dtype_name
from flatparam_files.checkpoint.manifest import EXTRA_STATE, TensorRecord
from flatparam_files.checkpoint.rank_part import RankFileWriter, RankReport, Ticket
from flatparam_files.checkpoint.values import encode, graft, reference
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.safetensors import Staging
from flatparam_files.disk.source import CHUNK_NBYTES, TensorInfo, split_path
from flatparam_files.disk.system import OPEN_FILES, AnyPath, free_nbytes


@final
class CheckpointWriter:
    """Writes one checkpoint of `world_size` files, as that many ranks would, from one process without a group.

    Give it the tensors in the order in which they were announced; `commit` then makes it a checkpoint. Left without
    that, nothing stays. Memory: the chunks that it is given, and `CHUNK_NBYTES` of staging in all.
    """

    def __init__(
        self,
        directory: AnyPath,
        tensors: Mapping[str, TensorInfo],
        values: Mapping[str, Any],
        *,
        world_size: int = 1,
        step: int = 0,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Begin the checkpoint `<directory>/step-<step>`.

        Args:
            directory: the directory of a run, made if it is not there.
            tensors: every tensor by its path; see `Source.tensors`.
            values: the tree without its tensors; see `Source.values`.
            aliases: the other paths of tied tensors.

        Raises:
            CheckpointError: if the step is there, another writer is, the disk is too full, or a value is refused.
        """
        if world_size < 1:
            raise ValueError(f"expected a world_size of at least 1, found {world_size}")
        check_step(step)
        self._tensors = dict(tensors)
        self._world_size = world_size
        self._aliases = dict(aliases or {})
        for path in self._aliases.values():
            if path not in tensors:
                raise ValueError(f"expected aliases of announced tensors, found one of {path!r}")
        self._values = _values(values, tensors)
        for path, info in tensors.items():
            dtype_name(info.dtype, split_path(path))
        self._check_space(Path(directory))
        self._committer = Committer(CheckpointDirectory(Path(directory)))
        self._writers: list[RankFileWriter] = []
        self._left = list(tensors)[::-1]
        self._is_open = True
        self._ticket: Ticket | None = None
        try:
            self._ticket = self._committer.prepare(step)
            self._begin_files(self._ticket)
        except BaseException:
            self.close()
            raise

    def _check_space(self, directory: Path) -> None:
        need = sum(info.nbytes + 512 for info in self._tensors.values())
        free = free_nbytes(directory.absolute())
        if need > free:
            raise CheckpointError(
                f"{directory}: the checkpoint needs {need:,} bytes, and {free:,} are free", path=directory
            )

    def _begin_files(self, ticket: Ticket) -> None:
        share = max(2**16, CHUNK_NBYTES // self._world_size)
        for rank in range(self._world_size):
            pieces = [
                (path, TensorRecord(info), share_of(info.numel, rank, self._world_size))
                for path, info in self._tensors.items()
            ]
            self._writers.append(
                RankFileWriter(
                    ticket,
                    rank,
                    self._world_size,
                    pieces,
                    staging=Staging(share),
                    is_reopened=self._world_size > OPEN_FILES.value,
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def write(self, path: str, chunks: Iterable[Tensor]) -> None:
        """Write the next tensor.

        Args:
            path: the next of the announced paths.
            chunks: its row-major elements in order.

        Raises:
            ValueError: if a different path, dtype or number of elements was announced.
        """
        announced = self._left[-1] if self._left else None
        if announced != path:
            expected = "no further tensor" if announced is None else f"tensor {announced!r}"
            raise ValueError(f"expected {expected}, found {path!r}: write them as they were announced")
        self._left.pop()
        numel = self._tensors[path].numel
        elements = _Elements(chunks)
        for rank, writer in enumerate(self._writers):
            span = share_of(numel, rank, self._world_size)
            if span:
                writer.write(elements.take(span.numel))
        if elements.drain():
            raise ValueError(f"tensor {path!r}: expected {numel} elements, found more")

    def commit(self) -> Path:
        """Make it a checkpoint, and `latest`; returns its directory.

        Raises:
            ValueError: if announced tensors are missing.
        """
        ticket = self._ticket
        if ticket is None or not self._is_open:
            raise ValueError("CheckpointWriter is closed: make a new one to write another checkpoint")
        if self._left:
            raise ValueError(f"{len(self._left)} announced tensors were not written, first {self._left[-1]!r}")
        for rank, writer in enumerate(self._writers):
            file = writer.finish()
            aliases, values = (self._aliases, self._values) if rank == 0 else ({}, {})
            RankReport(ticket.save_id, rank, file, writer.records, {}, aliases, values).write(ticket.temporary)
        path = self._committer.commit(ticket, self._world_size)
        self.close()
        return path

    def close(self) -> None:
        """Remove what was not committed; calling it twice is harmless."""
        if self._is_open:
            self._is_open = False
            for writer in self._writers:
                writer.close()
            if self._ticket is not None:
                self._committer.abandon(self._ticket)
            self._committer.close()


def _values(values: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The encoded tree, with a reference to each tensor that is no parameter's, buffer's or parameter's state."""
    found: dict[str, Tensor] = {}
    tree = {key: encode(value, (key,), found) for key, value in values.items()}
    if found:
        raise ValueError(f"expected values without tensors, found {next(iter(found))!r}")
    for path in tensors:
        if _is_in_tree(split_path(path)):
            with contextlib.suppress(TypeError, ValueError, IndexError, AttributeError):
                graft(tree, split_path(path), reference(path))
    return tree


def _is_in_tree(parts: Sequence[str]) -> bool:
    """Return whether a tensor is in the user's own tree, a module's extra state, or a setting of an optimizer."""
    part, *keys = parts
    if part == "model":
        return keys[0].rpartition(".")[2] == EXTRA_STATE
    # A name is first if there are several optimizers.
    return part in ("extra", "rank_extra") or (part == "optimizer" and "state" not in keys[:2])


def share_of(numel: int, index: int, count: int) -> Span:
    """Return part `index` of `count` equal parts of `[0, numel)`."""
    return Span(numel * index // count, numel * (index + 1) // count)


class _Elements:
    """A stream of chunks, taken by number of elements."""

    def __init__(self, chunks: Iterable[Tensor]) -> None:
        self._chunks = iter(chunks)
        self._rest = torch.empty(0, device="cpu")

    def take(self, numel: int) -> Iterator[Tensor]:
        while numel:
            if not self._rest.numel():
                chunk = next(self._chunks, None)
                if chunk is None:
                    return
                self._rest = chunk.detach().reshape(-1)
            part, self._rest = self._rest[:numel], self._rest[numel:]
            numel -= part.numel()
            if part.numel():
                yield part

    def drain(self) -> int:
        """Use up the stream until there is an element; returns how many elements were left over so far."""
        left = self._rest.numel()
        return left or next((chunk.numel() for chunk in self._chunks if chunk.numel()), 0)
