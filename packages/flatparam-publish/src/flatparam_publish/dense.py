"""`publish`: the full tensors of a sharded model, one bucket at a time, to a function or into files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_comm import telling
from flatparam_files import TensorFileWriter, TensorInfo
from flatparam_files.formats.hugging_face import INDEX_FILE, divided, encode_index
from flatparam_files.formats.output import SparseFile, appearing, check_new
from flatparam_publish.catalogue import Catalogue, PublishedTensor, ReceiverNames, published_tensors
from flatparam_publish.channel import Channel
from flatparam_publish.gathering import PUBLISH_NBYTES, Pair, full_tensors
from flatparam_publish.publish_error import agree_to_publish, all_or_error
from flatparam_publish.publisher import Publisher
from flatparam_runtime import Topology
from flatparam_state.at_rest import bring_to_rest
from flatparam_state.ranks import all_of, topology_of


@torch.no_grad()
def publish(
    model: nn.Module,
    sink: Sink | str | os.PathLike[str] | Channel,
    *,
    names: ReceiverNames | None = None,
    dtype: torch.dtype | None = None,
    bucket: int | None = None,
    every_rank: bool = False,
    only: Callable[[str], bool] | None = None,
) -> Catalogue:
    """Pass the full tensors of `model` to `sink`, one after the other; every rank calls it, outside of passes.

    Each flat parameter is gathered once, in the dtype in which it is published. While the sink has the tensors of one
    bucket, the next is gathered. Ranks that hold copies of shards take no part, unless they call the sink as well.

    Args:
        sink: a function of a name and a tensor, a path, or a channel. The tensor is on the model's device, and may be
            kept: its memory is not used again. At a path, a safetensors file is written if the name ends with
            `.safetensors`, else a directory of them for `from_pretrained`. It appears when it is whole. Through a
            channel (`Mailbox`, `GroupChannel`) every rank sends its own shards, and nothing is gathered; to publish
            again and again, make a `Publisher`.
        names: what tensors are called there, by their name in the model: a mapping, for those whose name differs, or a
            function, which returns None for a name that stays. A tied parameter is given once, under its first name.
        dtype: of floating-point tensors there; None keeps that of each.
        bucket: the bytes that full tensors take on a rank at most, unless one tensor is larger than half of it; by
            default 256 MiB (`state.publish_nbytes`).
        every_rank: call the sink on every rank, not on the first alone.
        only: which tensors are published, by their name in the model; None publishes all.

    Returns:
        What was published: names, shapes and dtypes, in order.

    Raises:
        PublishError: on every rank, naming the first rank whose sink has failed, and why.
        ValueError: on every rank, if names collide, or the dtype cannot be published.
        FlatParamError: inside a forward or backward pass, or while full parameters are summoned.
    """
    if isinstance(sink, Channel):
        if every_rank:
            raise ValueError("publish: every_rank takes a function as the sink; a channel is used by every rank")
        publisher = Publisher(model, sink, names=names, dtype=dtype, bucket=bucket, only=only)
        publisher.publish()
        return publisher.catalogue
    bring_to_rest(model)
    # Functions of the caller run here, maybe with an error on this rank alone.
    with telling("publish()"):
        pairs = published_tensors(model, names, dtype, only)
    catalogue = Catalogue(tuple(published for _, published in pairs))
    ranks, topology = all_of(model), topology_of(model)
    if every_rank and not callable(sink):
        raise ValueError("publish: every_rank takes a function as the sink; a path is written by the first rank")
    calls = every_rank or ranks.is_first
    nbytes = PUBLISH_NBYTES.value if bucket is None else bucket
    asked = {"every_rank": every_rank, "bucket": nbytes}
    agree_to_publish(ranks, "publish", catalogue.digest, asked)
    # Experts may be sharded over the ranks that hold copies of all else.
    has_parts = any(tensor.place is not None and tensor.place.unit.topology != topology for tensor, _ in pairs)
    giving = _Giving(sink if calls else None, catalogue)
    with giving:
        if every_rank or topology.replicate is None or topology.replicate.rank == 0 or has_parts:
            giving.all_of(pairs, topology, nbytes)
    all_or_error(lambda said: ranks.exchange(said, label="publish"), None, giving.error)
    return catalogue


# Giving them to a sink: a function, or the files at a path


Sink: TypeAlias = Callable[[str, Tensor], object]
"""Called with the receiver's name of each tensor, and the tensor."""


@final
@attrs.define(eq=False)
class _Giving:
    """The giving of tensors to a sink, if this rank has one.

    After an error the rank goes on with its part in collectives, and the error is told at the end.
    """

    sink: Sink | str | os.PathLike[str] | None
    catalogue: Catalogue
    error: BaseException | None = None
    _stack: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)
    _give: Sink | None = None

    def __enter__(self) -> None:
        if self.sink is None:
            return
        with self._noting():
            self._give = self._stack.enter_context(_open(self.sink, self.catalogue))

    def __exit__(self, *raised: object) -> None:
        with self._noting():
            # A path must not appear after an error.
            if self.error is not None:
                self._stack.__exit__(type(self.error), self.error, self.error.__traceback__)
            else:
                self._stack.__exit__(*raised)  # type: ignore[arg-type]  # what __exit__ was called with

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error

    def all_of(self, pairs: list[Pair], topology: Topology, nbytes: int) -> None:
        """Give each tensor."""

        def is_wanted() -> bool:
            return self._give is not None and self.error is None

        for name, tensor in full_tensors(pairs, topology, nbytes, is_wanted):
            with self._noting():
                assert self._give is not None, "it is wanted"
                self._give(name, tensor)
            del tensor


@contextlib.contextmanager
def _open(sink: Sink | str | os.PathLike[str], catalogue: Catalogue) -> Iterator[Sink]:
    if callable(sink):
        yield sink
        return
    with _writing(sink, catalogue) as files:
        yield files


# The files: safetensors, as `from_pretrained` of transformers reads them


@final
class _SafetensorsSink:
    """Called with each tensor of a catalogue in order, it writes files that hold them."""

    def __init__(self, files: Sequence[tuple[Path, Mapping[str, PublishedTensor]]]) -> None:
        """`files` are written one after the other."""
        self._left = list(files)[::-1]
        self._stack = contextlib.ExitStack()
        self._in_file: list[str] = []
        self._writer: TensorFileWriter | None = None

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor."""
        if not self._in_file:
            self._begin()
        assert self._writer is not None, "a file was begun"
        self._writer.write(name, [tensor])
        self._in_file.pop()
        if not self._in_file:
            self._stack.close()

    def _begin(self) -> None:
        path, tensors = self._left.pop()
        self._in_file = list(tensors)
        infos: dict[str, TensorInfo] = {name: tensor.info for name, tensor in tensors.items()}
        file = self._stack.enter_context(SparseFile(path))
        self._writer = self._stack.enter_context(TensorFileWriter(cast("BinaryIO", file), infos, {"format": "pt"}))

    def stop(self) -> None:
        """Close what is open; after an error it is not whole."""
        with contextlib.suppress(ValueError, OSError):
            self._stack.close()


@contextlib.contextmanager
def _writing(path: str | os.PathLike[str], catalogue: Catalogue) -> Iterator[_SafetensorsSink]:
    """A sink for the tensors of `catalogue`, in its order, whose files appear when all of them are written.

    Args:
        path: a new file, if the name ends with `.safetensors`; else a new directory, with an index if one file does not
            do.

    Raises:
        CheckpointError: if `path` exists, or cannot be written.
    """
    path = Path(path)
    check_new(path)
    tensors = {tensor.name: tensor for tensor in catalogue.tensors}
    with appearing(path) as temporary:
        if path.suffix == ".safetensors":
            files = [(temporary, tensors)]
        else:
            temporary.mkdir()
            parts = divided(tensors)
            files = [(temporary / name, part) for name, part in parts.items()]
            if len(files) > 1:
                (temporary / INDEX_FILE).write_bytes(encode_index(parts))
        sink = _SafetensorsSink(files)
        try:
            yield sink
        finally:
            sink.stop()
