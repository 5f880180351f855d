"""The boxes of a tensor that each rank holds, torch's `ShardedTensor` of them, and the ranks that put one together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import attrs
import torch
from typing_extensions import Self

from flatparam_runtime import Box, Collectives, FlatParamError, ParamSpec, Span, Topology, process_group_of


def boxes_of(spec: ParamSpec, span: Span) -> tuple[Box, ...]:
    """Return the boxes that tile the elements `span` of a parameter, counted in its memory order, in that order.

    At most `2 * ndim - 1`: what is left of a row, whole rows, the beginning of a row, and so in each dimension.
    """
    order = _dims_by_stride(spec)
    shape = [spec.shape[dim] for dim in order]
    return tuple(Box(_permuted(order, box.offsets), _permuted(order, box.sizes)) for box in span.boxes(shape))


def cut(spec: ParamSpec, boxes: Sequence[Box], elements: torch.Tensor) -> list[torch.Tensor]:
    """Return the views of `elements` (1-D, those of the boxes, in memory order), one for each box, in its sizes."""
    order = _dims_by_stride(spec)
    inverse = _inverse(order)
    views = []
    start = 0
    for box in boxes:
        part = elements[start : start + box.numel]
        views.append(part.view([box.sizes[dim] for dim in order]).permute(inverse))
        start += box.numel
    return views


def _dims_by_stride(spec: ParamSpec) -> list[int]:
    """Return the dimensions from the slowest to the fastest in memory; row-major if that is one answer."""
    if not spec.memory_order:
        return list(range(len(spec.shape)))
    return sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim] if spec.shape[dim] > 1 else 0)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _permuted(order: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[place] for place in _inverse(order))


# The boxes that each rank holds


@final
@attrs.frozen
class Tiling:
    """The boxes of a tensor by the rank of the group that holds them; ranks that hold none are absent."""

    shape: tuple[int, ...]
    boxes: Mapping[int, tuple[Box, ...]]

    @classmethod
    def of_spans(cls, spec: ParamSpec, span_of: Callable[[int], Span], ranks: Iterable[int]) -> Self:
        """Each of `ranks` holds an interval of the elements of `spec` in memory order; rank 0 holds what is empty."""
        found = {rank: boxes_of(spec, span_of(rank)) for rank in ranks}
        held = {rank: boxes for rank, boxes in found.items() if boxes}
        return cls(spec.shape, held or {0: (Box((0,) * len(spec.shape), spec.shape),)})

    @classmethod
    def of_chunks(cls, shape: Sequence[int], size: int) -> Self:
        """Rank `r` holds `tensor.chunk(size, dim=0)[r]`, if there are as many; rank 0 a 0-d tensor."""
        shape = tuple(shape)
        if not shape:
            return cls(shape, {0: (Box((), ()),)})
        rows = max(-(-shape[0] // size), 1)
        rest = (0,) * (len(shape) - 1)
        return cls(
            shape,
            {
                start // rows: (Box((start, *rest), (min(rows, shape[0] - start), *shape[1:])),)
                for start in range(0, max(shape[0], 1), rows)
            },
        )

    @classmethod
    def of_shards_on(cls, tensor: Any, ranks: Mapping[int, int]) -> Self:
        """As the metadata of `tensor`, a `ShardedTensor`, says.

        Args:
            tensor: its shards may lie on any of `ranks`.
            ranks: the ranks that can be asked, by their ranks in the world.

        Raises:
            FlatParamError: if it names different ranks.
        """
        boxes: dict[int, list[Box]] = {}
        for shard in tensor.metadata().shards_metadata:
            rank = None if shard.placement is None else ranks.get(shard.placement.rank() or 0)
            if rank is None:
                raise FlatParamError(
                    f"a ShardedTensor has a shard on {shard.placement}, which is none of the {len(ranks)} ranks that "
                    f"the model is sharded and replicated over, {sorted(ranks)} in the world: load the state with "
                    "torch.distributed.checkpoint into a state dict of this model, or load a full state"
                )
            boxes.setdefault(rank, []).append(Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)))
        in_order = {rank: tuple(sorted(held, key=lambda box: box.offsets)) for rank, held in boxes.items()}
        return cls(tuple(tensor.metadata().size), in_order)

    def of_rank(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes of `rank`; empty if it holds nothing."""
        return self.boxes.get(rank, ())

    def agrees_with(self, other: Self) -> bool:
        """Return whether every rank holds the same in both."""
        return self._sorted() == other._sorted()

    def _sorted(self) -> dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
        return {
            rank: sorted((box.offsets, box.sizes) for box in boxes if box.numel)
            for rank, boxes in self.boxes.items()
            if any(box.numel for box in boxes)
        }

    def sharded_tensor(
        self, parts: Sequence[torch.Tensor], dtype: torch.dtype, group: Collectives, *, empty_parts: bool = False
    ) -> Any:
        """Torch's `ShardedTensor`; no communication: every rank knows the whole tiling.

        Args:
            parts: this rank's boxes, with memory of their own.
            group: the ranks of the tiling, over a process group of torch.
            empty_parts: each rank without a part gets an empty one behind the end of the tensor: the planners of
                `torch.distributed.checkpoint` forget a `ShardedTensor` without, and take the file for an old torch's.

        Raises:
            FlatParamError: if `group` is not one of torch's.
        """
        from torch.distributed._shard.metadata import ShardMetadata
        from torch.distributed._shard.sharded_tensor.api import ShardedTensor
        from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
        from torch.distributed._shard.sharded_tensor.shard import Shard

        process_group = process_group_of(group)
        if process_group is None:
            raise FlatParamError(
                "a sharded state dict is made of torch's ShardedTensor, which needs a process group of "
                f"torch.distributed, found {group!r}; use a full state dict there, or flatparam's own checkpoints"
            )
        device = parts[0].device if parts else torch.device("cpu")
        boxes = dict(self.boxes)
        if empty_parts and self.shape:
            rest = self.shape[1:]
            empty = Box((self.shape[0], *(0 for _ in rest)), (0, *rest))
            # On all ranks alike: they have one description of the tensor.
            boxes = {rank: self.of_rank(rank) or (empty,) for rank in range(group.size)}
            parts = parts or [torch.empty(empty.sizes, dtype=dtype, device=device)]
        metadata = {
            rank: [
                ShardMetadata(list(box.offsets), list(box.sizes), _placement(global_rank, device))
                for box in boxes[rank]
            ]
            for global_rank, rank in _ranks_in(group).items()
            if rank in boxes
        }
        shards = [Shard(part, facts) for part, facts in zip(parts, metadata.get(group.rank, ()), strict=True)]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards,
            ShardedTensorMetadata(
                [facts for rank in sorted(metadata) for facts in metadata[rank]],
                torch.Size(self.shape),
                TensorProperties(dtype=dtype),
            ),
            process_group=process_group,
        )


def is_sharded_tensor(value: object) -> bool:
    """Return whether `value` is torch's `ShardedTensor`; it is not imported for that."""
    return any(kind.__name__ == "ShardedTensor" for kind in type(value).__mro__)


def _ranks_in(group: Collectives) -> dict[int, int]:
    """Return the ranks of the group, by their ranks in the world."""
    process_group = process_group_of(group)
    if process_group is None:
        return {rank: rank for rank in range(group.size)}
    return {rank: number for number, rank in enumerate(torch.distributed.get_process_group_ranks(process_group))}


def _placement(rank: int, device: torch.device) -> str:
    if device.type == "cpu":
        return f"rank:{rank}/cpu"
    module = getattr(torch, device.type)
    return f"rank:{rank}/{device.type}:{rank % module.device_count()}"


def gathered(
    held: Tiling,
    shards: Mapping[tuple[int, ...], torch.Tensor],
    dtype: torch.dtype,
    group: Collectives | EveryRank,
    device: torch.device,
) -> torch.Tensor:
    """The full tensor, gathered from what every rank of `group` holds of it, as `held` says; every rank calls it.

    Args:
        shards: the tensors of this rank's boxes, by their offsets.
        device: where collectives work, and where the tensor will be.
    """
    width = max(sum(box.numel for box in boxes) for boxes in held.boxes.values())
    everything = torch.empty(width * group.size, dtype=dtype, device=device)
    start = group.rank * width
    for box in held.of_rank(group.rank):
        everything[start : start + box.numel].view(box.sizes).copy_(shards[box.offsets])
        start += box.numel
    if width:
        mine = everything[group.rank * width :][:width]
        group.all_gather(everything, mine, label="sharded state").wait()
    # The parts are the tensor, one after the other.
    if held.agrees_with(Tiling.of_chunks(held.shape, group.size)):
        return everything[: torch.Size(held.shape).numel()].view(held.shape)
    full = everything.new_empty(held.shape)
    for rank, boxes in held.boxes.items():
        start = rank * width
        for box in boxes:
            box.of(full).copy_(everything[start : start + box.numel].view(box.sizes))
            start += box.numel
    return full


# The ranks that hold the pieces of a `ShardedTensor`: those of the shard group, or all data-parallel ranks.
#
# `torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict` makes chunks for every rank in the world,
# whatever the model is sharded over. So with NO_SHARD and HYBRID_SHARD the pieces lie in several replicas.


@final
@attrs.frozen
class EveryRank:
    """All ranks of a topology that both shards and copies, replica by replica, as one group."""

    topology: Topology

    @property
    def rank(self) -> int:
        """The number of this rank in the topology."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.topology.data_parallel_size

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Return every rank's `value`, replica by replica."""
        return self.topology.exchange(value, label=label)

    def barrier(self, *, label: str = "") -> None:
        """Return when every rank has called it."""
        self.topology.exchange(None, label=label)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Any:
        """Fill `output` with the `shard` of each rank, in their order; every one of them calls it.

        The shard group is waited for here. `shard` may be this rank's place in `output`.
        """
        near, far = self.topology.shard, self.topology.replicate
        assert far is not None, "it is made of topologies that copy"
        width = shard.numel() * near.size
        replica = output[far.rank * width :][:width]
        near.all_gather(replica, shard, label=label).wait()
        return far.all_gather(output, replica, label=label)


def holders_of(tensor: Any, topology: Topology) -> tuple[Collectives | EveryRank, Mapping[int, int]]:
    """Return those that can put `tensor`, a `ShardedTensor`, together, and their numbers by their ranks in the world.

    Every data-parallel rank calls it. All of them come to the same, although one replica may hold every piece: a tensor
    belongs to the shard group if that is the process group which the tensor was made over.
    """
    near = _ranks_in(topology.shard)
    if topology.replicate is None or topology.replicate.size == 1 or _ranks_of(tensor) == near.keys():
        return topology.shard, near
    known = topology.exchange(_rank_in_world(topology), label="ranks of a sharded state")
    ranks = {rank: number for number, rank in enumerate(known)}
    return EveryRank(topology), ranks


def _ranks_of(tensor: Any) -> set[int]:
    """Return the ranks of the world that `tensor` was made over, also those that hold no piece."""
    # No public name has the group of a ShardedTensor.
    return set(torch.distributed.get_process_group_ranks(tensor._process_group))


def _rank_in_world(topology: Topology) -> int:
    groups = (topology.shard, topology.replicate)
    if any(group is not None and process_group_of(group) is not None for group in groups):
        return torch.distributed.get_rank()
    return topology.shard.rank
