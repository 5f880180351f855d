"""The full tensors of a sharded model, one bucket of them at a time, the next one gathered while one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor

from flatparam_publish.catalogue import PublishedTensor
from flatparam_runtime import Collectives, FlatParamHandle, Span, Threshold, Topology
from flatparam_state.model_tensors import ModelTensor
from flatparam_state.places import Place

PUBLISH_NBYTES: Final = Threshold(
    "state.publish_nbytes",
    256 * 2**20,
    "Full tensors that are published are gathered in two buckets of half as many bytes, or of one tensor if that is "
    "larger; a rank that sends what has changed looks at as many bytes at a time.",
)

Pair = tuple[ModelTensor, PublishedTensor]


def full_tensors(
    pairs: Sequence[Pair], topology: Topology, nbytes: int, is_wanted: Callable[[], bool]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in full, under its first name, in the dtype in which it is published.

    Every rank of a shard group iterates to the end, at the same pace. While one bucket is used the next is gathered.
    The memory of a bucket is its own, and is free when nobody has a tensor of it any more. Of a `DTensor`, or of
    experts that are stacked, the bucket has this rank's part, and the whole is made beside it.

    Args:
        pairs: see `published_tensors`.
        topology: the ranks of the model.
        nbytes: of the buckets; see `most_nbytes`.
        is_wanted: whether this rank wants the tensors; asked before each. Otherwise it only takes part.
    """
    buckets = _buckets(pairs, nbytes // 2)
    following = buckets[0].gathered(topology) if buckets else None
    for number in range(len(buckets)):
        present = following
        assert present is not None, "the bucket was gathered in the round before"
        following = None
        # Both are in memory from here until the tensors of the present one are used.
        if number + 1 < len(buckets):
            following = buckets[number + 1].gathered(topology)
        yield from present.tensors(is_wanted)
        del present


def most_nbytes(pairs: Sequence[Pair], nbytes: int) -> int:
    """Return the most bytes that `full_tensors` has in memory: of two buckets that follow each other."""
    sizes = [bucket.nbytes for bucket in _buckets(pairs, nbytes // 2)]
    return max((one + other for one, other in zip([0, *sizes], [*sizes, 0], strict=True)), default=0)


@final
@attrs.frozen(eq=False)
class _TensorBucket:
    """Tensors that are gathered together: some that follow each other in a flat parameter, or one that is whole."""

    pairs: tuple[Pair, ...]
    place: Place | None
    span: Span
    """The part of the flat parameter that is gathered."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is published."""
        return self.pairs[0][1].info.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes while it is in memory; a tensor that is whole takes some only if it is cast."""
        casts = self.place is not None or self.pairs[0][0].dtype != self.dtype
        return self.span.numel * self.dtype.itemsize if casts else 0

    def gathered(self, topology: Topology) -> _Gathered:
        """Begin to gather it."""
        if self.place is None:
            tensor = self.pairs[0][0].local
            return _Gathered(self, tensor.to(self.dtype).reshape(-1), [])
        handle, group = self.place.handle, self.place.unit.topology.shard
        full = torch.empty(self.span.numel, dtype=self.dtype, device=handle.device)
        for own, shard in _owned(handle, self.span, handle.rank):
            _part(full, self.span, own).copy_(handle.flat_param.detach()[shard.as_slice()])
        return _Gathered(self, full, list(self._begin(full, handle, group)))

    def _begin(self, full: Tensor, handle: FlatParamHandle, group: Collectives) -> Iterator[Any]:
        if group.size == 1 or not self.span:
            return
        layout, label = handle.layout, f"publish {self.pairs[0][1].name}"
        if self.span.numel == layout.numel and not (layout.uneven_numels or layout.is_chunked):
            own = _part(full, self.span, layout.shard_span(handle.rank))
            yield group.all_gather(full, own, label=label)
            return
        for rank in range(group.size):
            for span, _ in _owned(handle, self.span, rank):
                yield group.broadcast(_part(full, self.span, span), root=rank, label=label)


def _part(full: Tensor, span: Span, of: Span) -> Tensor:
    return full[of.start - span.start : of.stop - span.start]


def _owned(handle: FlatParamHandle, span: Span, rank: int) -> Iterator[tuple[Span, Span]]:
    """Yield the parts of `span` of the flat parameter that `rank` owns, each with its place in the rank's shard."""
    layout = handle.layout
    if not layout.is_chunked:
        shard = layout.shard_span(rank)
        own = span.overlap(shard)
        if own:
            yield own, own.relative_to(shard.start)
        return
    for slot, fragment in zip(layout.slots, layout.fragments(rank), strict=True):
        if fragment.in_param and span.overlap(slot.span):
            yield fragment.in_param.shifted(slot.span.start), fragment.in_shard


@final
@attrs.define(eq=False)
class _Gathered:
    """A bucket in memory, some of which may be under way."""

    bucket: _TensorBucket
    full: Tensor
    pending: list[Any]

    def tensors(self, is_wanted: Callable[[], bool]) -> Iterator[tuple[str, Tensor]]:
        """Wait for all of it, and yield the tensors."""
        for each in self.pending:
            each.wait()
        self.pending = []
        start = 0 if self.bucket.place is None else self.bucket.span.start
        for tensor, published in self.bucket.pairs:
            slot = _span_of(tensor, self.bucket.place)
            elements = self.full[slot.start - start : slot.stop - start]
            # Whoever holds a part takes part in this.
            whole = None if tensor.held is None else _whole(tensor, elements)
            if is_wanted():
                yield published.name, published.view(elements) if whole is None else whole


def _whole(tensor: ModelTensor, elements: Tensor) -> Tensor:
    """Return all of a tensor of which `elements` are the part of this rank and of the data-parallel ranks beside it."""
    assert tensor.place is not None, "a part is in a unit"
    handle, index = tensor.place.handle, tensor.place.names.index(tensor.names)
    spec = handle.layout.slots[index].spec
    found: Tensor = handle.forms.meshes.whole(handle, index, elements.as_strided(spec.shape, spec.stride))
    return found


def _span_of(tensor: ModelTensor, place: Place | None) -> Span:
    if place is None:
        return Span(0, tensor.numel)
    return place.handle.layout.slots[place.names.index(tensor.names)].span


def _buckets(pairs: Sequence[Pair], nbytes: int) -> list[_TensorBucket]:
    """Cut `pairs` into buckets of at most `nbytes`, or of one tensor; a flat parameter that fits is one bucket."""
    buckets: list[_TensorBucket] = []
    of_handle: dict[int, list[Pair]] = {}
    for pair in pairs:
        if pair[0].place is None:
            buckets.append(_TensorBucket((pair,), None, Span(0, pair[0].numel)))
            continue
        key = id(pair[0].place.handle)
        if key not in of_handle:
            of_handle[key] = []
            buckets.append(_TensorBucket((pair,), pair[0].place, Span(0, 0)))
        of_handle[key].append(pair)
    return [
        bucket
        for each in buckets
        for bucket in ([each] if each.place is None else _cut(each.place, of_handle[id(each.place.handle)], nbytes))
    ]


def _cut(place: Place, pairs: list[Pair], nbytes: int) -> Iterator[_TensorBucket]:
    layout, itemsize = place.handle.layout, pairs[0][1].info.dtype.itemsize
    if layout.numel * itemsize <= nbytes:
        yield _TensorBucket(tuple(pairs), place, Span(0, layout.numel))
        return
    begun: list[Pair] = []
    start = stop = 0
    for pair in pairs:
        slot = _span_of(pair[0], place)
        if begun and (slot.stop - start) * itemsize > nbytes:
            yield _TensorBucket(tuple(begun), place, Span(start, stop))
            begun = []
        if not begun:
            start = slot.start
        begun.append(pair)
        stop = slot.stop
    yield _TensorBucket(tuple(begun), place, Span(start, stop))
