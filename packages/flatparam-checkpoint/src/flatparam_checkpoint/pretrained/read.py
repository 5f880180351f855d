"""The values of a sharded model from files, each rank its own bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import attrs
import torch
from torch import Tensor, nn

from flatparam_checkpoint.agreement import raise_told
from flatparam_checkpoint.pretrained.files import PretrainedFiles
from flatparam_files import CheckpointError
from flatparam_files.disk.source import filled
from flatparam_files.formats.stored_tensors import StridedTensor
from flatparam_runtime import Collectives, ExchangesValues, Span, Topology
from flatparam_state.at_rest import bring_to_rest
from flatparam_state.model_tensors import ModelTensor, model_tensors
from flatparam_state.ranks import all_of


def _nothing(done: int) -> None:
    """Observe nothing."""


@torch.no_grad()
def read_pretrained(
    model: nn.Module, files: PretrainedFiles, topology: Topology, *, observe: Callable[[int], object] = _nothing
) -> int:
    """Read the tensors of `model` from `files`, cast to its dtypes; every rank calls it, after `fit` found no mismatch.

    A rank reads the elements of its shards. Ranks that hold copies of a shard read a part each, and send it to each
    other. What is whole on every rank is read by the first one, and sent. Of a `DTensor` each rank reads what it holds;
    of one that is cut along another dimension than the first ones, all. Memory: one tensor at a time, at most.

    Args:
        topology: the data-parallel ranks of the model.
        observe: called with the bytes of each piece that this rank has read.

    Returns:
        The bytes that this rank has read of the tensors.

    Raises:
        CheckpointError: on every rank, if one could not read, or if files have a tied parameter under several of its
            names with different values; the values of the model are of no use then.
    """
    bring_to_rest(model)
    reading = _RankReading(files, all_of(model), topology, observe)
    for tensor in model_tensors(model):
        found = files.found(tensor.names)
        if found and tensor.numel:
            reading.fill(tensor, files.different(found))
    reading.agree()
    return reading.nbytes


@final
@attrs.define(eq=False)
class _RankReading:
    """The reading of one rank. It goes on with its part in collectives after an error, which is told at the end."""

    files: PretrainedFiles
    ranks: ExchangesValues
    topology: Topology
    observe: Callable[[int], object]
    nbytes: int = 0
    error: BaseException | None = None

    def fill(self, tensor: ModelTensor, names: Sequence[str]) -> None:
        """Read `tensor`, which the files have under each of `names`."""
        if tensor.place is None:
            self._fill_whole(tensor, names)
            return
        replicate = tensor.place.unit.topology.replicate
        if replicate is None or replicate.size == 1:
            self._read(names, tensor, tensor.span, tensor.local)
        elif tensor.span:
            self._fill_shared(tensor, names, replicate)

    def _fill_shared(self, tensor: ModelTensor, names: Sequence[str], replicate: Collectives) -> None:
        """Read this rank's part of what several ranks hold, and get theirs."""
        numel, each = tensor.span.numel, -(-tensor.span.numel // replicate.size)
        start, stop = (min(numel, each * rank) for rank in (replicate.rank, replicate.rank + 1))
        full = tensor.local.new_zeros(each * replicate.size)
        own = full[replicate.rank * each :][:each]
        mine = Span(tensor.span.start + start, tensor.span.start + stop)
        self._read(names, tensor, mine, own[: stop - start])
        replicate.all_gather(full, own, label=f"load {names[0]}").wait()
        tensor.local.copy_(full[:numel])

    def _fill_whole(self, tensor: ModelTensor, names: Sequence[str]) -> None:
        """Read on the first rank what every rank has whole, and send it to the others."""
        whole = tensor.local.new_empty(tensor.numel)
        if self.topology.is_first:
            self._read(names, tensor, Span(0, tensor.numel), whole)
        for group in reversed(self.topology.groups):
            group.broadcast(whole, root=0, label=f"load {names[0]}").wait()
        tensor.put(whole)

    def _read(self, names: Sequence[str], tensor: ModelTensor, span: Span, target: Tensor) -> None:
        """Fill `target` with the elements `span`; after an error, here or before, leave it."""
        if self.error is not None or not span:
            return
        try:
            self._fill(names[0], tensor, span, target)
            for name in names[1:]:
                other = torch.empty_like(target)
                self._fill(name, tensor, span, other)
                if not torch.equal(other.view(torch.uint8), target.view(torch.uint8)):
                    raise CheckpointError(
                        f"{names[0]!r} and {name!r} are one parameter of the model, and the files have different "
                        "values for them; make the model without that tie (tie_word_embeddings=False in its "
                        "configuration), or give one of them a different name with mapping=, so that it is left out",
                        fqn=name,
                    )
        except BaseException as error:
            self.error = error

    def _fill(self, name: str, tensor: ModelTensor, span: Span, target: Tensor) -> None:
        """Fill `target` with the elements `span` of what the files have under `name`."""
        stored = self.files.source.stored[self.files.paths[name]]
        spans = tensor.intervals(span)
        if tensor.place is not None and tensor.stride is not None:
            filled(target, self._reordered(name, spans, tensor.stride))
            return
        for own, part in zip(spans, torch.split(target.view(-1), [own.numel for own in spans]), strict=True):
            if isinstance(stored, StridedTensor) and stored.can_fill(part):
                for nbytes in stored.read_into(own, part):
                    self._count(nbytes)
            else:
                filled(part, self._counted(self.files.paths[name], own))

    def _reordered(self, name: str, spans: Sequence[Span], stride: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield the elements `spans` in the memory order of `stride`: the tensor is read whole."""
        path, info = self.files.paths[name], self.files.info(name)
        full = torch.cat(list(self._counted(path, Span(0, info.numel)))).view(info.shape)
        ordered = torch.empty_strided(info.shape, stride, dtype=full.dtype, device="cpu").copy_(full)
        flat = ordered.as_strided((full.numel(),), (1,))
        yield from (flat[span.as_slice()] for span in spans)

    def _counted(self, path: str, span: Span) -> Iterator[Tensor]:
        for chunk in self.files.source.read(path, span):
            yield chunk
            self._count(chunk.nbytes)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.observe(nbytes)

    def agree(self) -> None:
        """Raise the error of the first rank that has one, on every rank.

        Raises:
            CheckpointError: naming the rank; a rank that was interrupted raises that again.
        """
        said = "" if self.error is None else CheckpointError.told(self.error)
        told = self.ranks.exchange(said, label="load pretrained")
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error
        hint = "the values of the model are not usable now"
        raise_told(told, self.error, path=self.files.path, hint=hint)
