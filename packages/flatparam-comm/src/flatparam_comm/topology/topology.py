"""The groups of ranks that parameters are sharded over and copied over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import attrs

from flatparam_comm.collectives import Collectives
from flatparam_comm.errors import MismatchError, told_by_ranks
from flatparam_comm.guarding import tell_failure

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@final
@attrs.frozen
class _Labelled:
    """A rank's value in an exchange, and the exchange that the rank takes it for."""

    label: str
    value: Any


@final
@attrs.frozen
class Topology:
    """The groups that data parallelism works over.

    `shard` is the group over which each buffer is cut into shards; `replicate`, if there is one, is the group of the
    ranks that hold the same shard. `mesh` is the mesh that the two were taken from, if there was one.
    """

    shard: Collectives
    replicate: Collectives | None = None
    mesh: DeviceMesh | None = attrs.field(default=None, eq=False, repr=False)
    groups: tuple[Collectives, ...] = attrs.field(init=False, eq=False, repr=False)
    """The shard group and the replicate group, without those of one rank."""

    @groups.default
    def _of_several_ranks(self) -> tuple[Collectives, ...]:
        groups = (self.shard,) if self.replicate is None else (self.shard, self.replicate)
        return tuple(group for group in groups if group.size > 1)

    @classmethod
    def cut(cls, world: Collectives, rows: Sequence[Sequence[int]]) -> Topology:
        """Cut `world` into `rows`, of equally many ranks each: the ranks of a row share parameters, in their order.

        The ranks that have one place in their rows hold copies. Every rank of `world` calls it, with all rows.
        """
        return cls(_own_group(world, rows), _own_group(world, [*zip(*rows, strict=True)]))

    def __deepcopy__(self, memo: dict[int, object]) -> Topology:
        # A copy of a model works over the same ranks.
        return self

    @property
    def group(self) -> Collectives:
        """The group whose first rank speaks for all: the shard group, or the replicate group if nothing is sharded."""
        return self.replicate if self.replicate is not None and self.shard.size == 1 else self.shard

    @property
    def rank(self) -> int:
        """This rank's number among all data-parallel ranks, replica by replica; messages name it."""
        return self.shard.rank + self.shard.size * (0 if self.replicate is None else self.replicate.rank)

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all data-parallel ranks."""
        return self.rank == 0

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that a gradient is averaged over."""
        return self.shard.size * (1 if self.replicate is None else self.replicate.size)

    def exchange(self, value: T, *, label: str = "") -> list[T]:
        """The `value` of every data-parallel rank, in rank order, replica by replica; every one of them calls it.

        Raises:
            MismatchError: if ranks exchange values under different labels, or outside of a `Topology`, as happens
                after one of them caught an error and went on to something else.
        """
        known: list[Any] = [_Labelled(label, value)]
        for group in self.groups:
            # A rank that is in the same place sends a list.
            told = [each if isinstance(each, list) else [each] for each in group.exchange(known, label=label)]
            known = [item for items in told for item in items]
        labels = [item.label if isinstance(item, _Labelled) else None for item in known]
        if any(found != label for found in labels):
            error = self._mismatch(label, labels)
            # A rank that got what it asked for does not know.
            tell_failure(error, f"exchange of {label!r}")
            raise error
        return [item.value for item in known]

    def _mismatch(self, label: str, labels: Sequence[str | None]) -> MismatchError:
        said = [
            (rank, "exchanges something else" if found is None else f"exchanges {found!r}")
            for rank, found in enumerate(labels)
        ]
        advice = (
            "make every rank call the same units, passes and state functions in one order, and let a rank that has "
            "caught an error of its own tell the others before it goes on"
        )
        text = told_by_ranks("the ranks are in different places", said, advice)
        return MismatchError(self.rank, "exchange", label, text)


def _own_group(world: Collectives, groups: Sequence[Sequence[int]]) -> Collectives:
    # Every rank makes every group, in the same order.
    made = [world.subgroup(ranks) for ranks in groups]
    return next(group for group in made if group is not None)
