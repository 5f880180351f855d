"""The way of each matrix to its owner and back, in buckets: a plan of numbers, the same on every rank.

Rank `s` of replica `r` sends its part of a matrix to the owner in its own replica; the update comes back the same way,
and then goes to the ranks `s` of the other replicas. A message has, for one matrix after the other, the sender's part
in the parameter's memory order. The own part of an owner does not travel.

So over all ranks of a replica, of a matrix of `E` elements of which its owner holds `e`, `b s (E - e)` bytes go to the
owner and `c (E - e)` back: `s` tensors in a dtype of `b` bytes, and the update in one of `c` (Muon: 1, 2 and 2). The
ranks of a `DTensor` that is cut over a mesh of its own are those of data parallelism and of this mesh together; copies
of a `DTensor` are stepped apart, each with these bytes and all products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_comm import ParamSpec, Span, Threshold
from flatparam_optim.matrices.matrix_owners import Job, choose_owners

BUCKET = Threshold(
    "runtime.matrix_bucket_numel",
    1 << 22,
    "Matrices with up to so many elements together come to one owner at a time; a longer one comes alone.",
)


@final
@attrs.frozen
class HeldBlock:
    """The part of a `DTensor` that ranks of one place in its mesh hold, if it is no interval of the whole: a box."""

    offsets: tuple[int, ...]
    """The first index in each dimension."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """The strides of the part, in elements."""

    @property
    def numel(self) -> int:
        """Return its number of elements."""
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of the whole, as a view."""
        box = zip(self.offsets, self.shape, strict=True)
        return whole[tuple(slice(start, start + size) for start, size in box)]


@final
@attrs.frozen
class Matrix:
    """A parameter that is stepped as a whole, or a matrix of a stack, and what its step costs."""

    spec: ParamSpec = attrs.field(repr=False)
    cost: int
    spans: dict[int, Span] = attrs.field(eq=False)
    """For each rank that has elements of it, which ones, counted in memory order."""
    blocks: tuple[HeldBlock, ...] = ()
    """If parts are no intervals of the memory order: what is counted instead, block after block, each in its order."""
    is_spread: bool = False
    """Whether ranks of another mesh hold parts of it: then the memory order is none that the model has chosen."""

    def whole(self, flat: Tensor) -> Tensor:
        """Return the whole of 1-D `flat`, in which elements are counted as in `spans`; it may be a view."""
        if not self.blocks:
            found = flat.as_strided(self.spec.shape, self.spec.stride)
            # The bits of products and sums may depend on the order.
            return found.contiguous() if self.is_spread else found
        found = flat.new_empty(self.spec.shape)
        for block, part in zip(self.blocks, self._parts(flat), strict=True):
            block.of(found).copy_(part)
        return found

    def flat(self, whole: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the elements of `whole` as they are counted, 1-D, in `dtype`; the memory is its own."""
        found = torch.empty(self.numel, dtype=dtype, device=whole.device)
        if not self.blocks:
            found.as_strided(self.spec.shape, self.spec.stride).copy_(whole)
        for block, part in zip(self.blocks, self._parts(found), strict=True):
            part.copy_(block.of(whole))
        return found

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield the views of `flat` that are blocks, each in its shape."""
        start = 0
        for block in self.blocks:
            yield flat[start : start + block.numel].as_strided(block.shape, block.stride, flat.storage_offset() + start)
            start += block.numel

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return self.spec.numel

    @property
    def is_kept_whole(self) -> bool:
        """Whether its rule keeps it whole on one rank, which then steps it."""
        return self.spec.rule.kind == "whole"


@final
@attrs.frozen(slots=False)
class Routes:
    """The owners of matrices, and the buckets in which matrices travel; see this module."""

    matrices: tuple[Matrix, ...]
    ranks: int
    replicas: int
    owners: tuple[int, ...]
    """For each matrix the place (`replica * ranks + rank`) that steps it."""
    bucket_numel: int

    @classmethod
    def plan(
        cls,
        matrices: Sequence[Matrix],
        ranks: int,
        replicas: int = 1,
        *,
        keepers: Sequence[Sequence[int]] | None = None,
    ) -> Self:
        """Choose owners and buckets.

        Args:
            matrices: none of them empty, in the same order on every rank.
            ranks: the ranks over which they are sharded.
            replicas: how many times the shards are there.
            keepers: if owners keep state: for each matrix the places that have it, one of which is to be the owner; if
                there are none, the owner will be a rank that holds elements.
        """
        places = range(ranks * replicas)
        jobs = []
        for number, each in enumerate(matrices):
            holders = [(rank, span.numel) for rank, span in each.spans.items()]
            may: Sequence[int] = keepers[number] if keepers else ()
            if not may and (each.is_kept_whole or keepers is not None):
                may = [place for place in places if place % ranks in each.spans]
            jobs.append(Job(each.cost, holders, may))
        owners = choose_owners(jobs, ranks, replicas)
        return cls(tuple(matrices), ranks, replicas, tuple(owners), BUCKET.value)

    @cached_property
    def _owned(self) -> list[list[list[int]]]:
        """For each place its buckets, each a list of matrices by number; the costliest come first."""
        owned: list[list[int]] = [[] for _ in range(self.ranks * self.replicas)]
        for number, place in enumerate(self.owners):
            owned[place].append(number)
        return [self._in_buckets(numbers) for numbers in owned]

    def _in_buckets(self, numbers: list[int]) -> list[list[int]]:
        buckets: list[list[int]] = []
        filled = 0
        for number in sorted(numbers, key=lambda each: (-self.matrices[each].cost, each)):
            numel = self.matrices[number].numel
            if not buckets or filled + numel > self.bucket_numel:
                buckets.append([])
                filled = 0
            buckets[-1].append(number)
            filled += numel
        return buckets

    @cached_property
    def buckets(self) -> int:
        """How many buckets there are, the same on every rank."""
        return max(map(len, self._owned), default=0)

    def owned(self, place: int, bucket: int) -> Sequence[int]:
        """Return the matrices of `bucket` that `place` steps, by number."""
        mine = self._owned[place]
        return mine[bucket] if bucket < len(mine) else ()

    def in_replica(self, replica: int, bucket: int) -> list[int]:
        """Return the matrices of `bucket` that are stepped in `replica`, by number, owner after owner."""
        places = range(replica * self.ranks, (replica + 1) * self.ranks)
        return list(itertools.chain.from_iterable(self.owned(place, bucket) for place in places))

    def travels(self, replica: int, bucket: int) -> bool:
        """Return whether a part of a matrix of `bucket` has to go from one rank of `replica` to another."""
        return any(
            list(self.matrices[number].spans) != [self.owners[number] % self.ranks]
            for number in self.in_replica(replica, bucket)
        )

    def parts(self, numbers: Sequence[int], rank: int) -> list[tuple[int, Span]]:
        """Return those of the matrices `numbers` of which `rank` has elements, and which."""
        found = ((number, self.matrices[number].spans.get(rank)) for number in numbers)
        return [(number, span) for number, span in found if span is not None]

    def message_numel(self, numbers: Sequence[int], rank: int, streams: int = 1) -> int:
        """Return the elements of a message with the parts of `rank` of the matrices `numbers`.

        Args:
            numbers: the matrices.
            rank: whose parts.
            streams: the tensors that travel for each matrix, such as its gradient.
        """
        return sum(streams * span.numel for _, span in self.parts(numbers, rank))

    def replica_numel(self, bucket: int, rank: int) -> int:
        """The elements that each replica gives the others of `bucket`: as many as the one that has most to give."""
        return max(self.message_numel(self.in_replica(replica, bucket), rank) for replica in range(self.replicas))

    def sent_numels(self, place: int, streams: int = 1) -> tuple[int, int, int]:
        """Return the elements that `place` sends in a step: to owners, from there, and to other replicas."""
        replica, rank = divmod(place, self.ranks)
        to_owners = from_owner = to_replicas = 0
        for bucket in range(self.buckets):
            for other in range(self.ranks):
                if other != rank:
                    theirs = self.owned(replica * self.ranks + other, bucket)
                    to_owners += self.message_numel(theirs, rank, streams)
                    from_owner += self.message_numel(self.owned(place, bucket), other)
            to_replicas += (self.replicas - 1) * self.replica_numel(bucket, rank)
        return to_owners, from_owner, to_replicas
