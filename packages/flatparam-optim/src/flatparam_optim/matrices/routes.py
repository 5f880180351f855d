"""The way of each matrix to its owner and back, in buckets: numbers only, the same on every rank.

Rank `s` of replica `r` sends its part of a matrix to the owner in its own replica; the update comes back the same way,
and then goes to the ranks `s` of the other replicas. A message has, for one matrix after the other, the sender's part
in the parameter's memory order. The own part of an owner does not travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import final

import attrs
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
class Matrix:
    """A parameter that is stepped as a whole, or a matrix of a stack, and what its step costs."""

    spec: ParamSpec = attrs.field(repr=False)
    cost: int
    spans: dict[int, Span] = attrs.field(eq=False)
    """For each rank that has elements of it, which ones, counted in memory order."""

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
        return max(
            self.message_numel(self.in_replica(replica, bucket), rank) for replica in range(self.replicas)
        )

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
