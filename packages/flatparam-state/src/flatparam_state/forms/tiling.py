"""The boxes of a tensor that each rank holds, and torch's `ShardedTensor` of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

import attrs
import torch
from typing_extensions import Self

from flatparam_runtime import Box, Collectives, FlatParamError, ParamSpec, Span, process_group_of
from flatparam_state.forms.boxes import boxes_of

__all__ = ["Gathers", "Started", "Tiling", "gathered", "is_sharded_tensor", "ranks_in"]


class Started(Protocol):
    """A collective that was started."""

    def wait(self) -> None:
        """Return when its result is there."""
        ...


class Gathers(Protocol):
    """Ranks that gather tensors: a group, or several groups together."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Started:
        """Fill `output` with the `shard` of each rank, in their order."""
        ...


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
        return cls(
            tuple(tensor.size()),
            {rank: tuple(sorted(held, key=lambda box: box.offsets)) for rank, held in boxes.items()},
        )

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
        self,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        group: Collectives,
        *,
        empty_parts: bool = False,
    ) -> Any:
        """Torch's `ShardedTensor`; no communication: every rank knows the whole tiling.

        Args:
            parts: this rank's boxes, with memory of their own.
            group: the ranks of the tiling, over a process group of torch.
            empty_parts: each rank without a part gets an empty one behind the end of the tensor. The planners of
                `torch.distributed.checkpoint` forget a `ShardedTensor` that has no local shard, and then take the file
                for one of an old torch.

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
            for global_rank, rank in ranks_in(group).items()
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


def ranks_in(group: Collectives) -> dict[int, int]:
    """Return the ranks of the group, by their ranks in the world."""
    process_group = process_group_of(group)
    if process_group is None:
        return {rank: rank for rank in range(group.size)}
    return {
        rank: number for number, rank in enumerate(torch.distributed.get_process_group_ranks(process_group))
    }


def _placement(rank: int, device: torch.device) -> str:
    if device.type == "cpu":
        return f"rank:{rank}/cpu"
    module = getattr(torch, device.type)
    return f"rank:{rank}/{device.type}:{rank % module.device_count()}"


def gathered(
    held: Tiling,
    shards: Mapping[tuple[int, ...], torch.Tensor],
    dtype: torch.dtype,
    group: Gathers,
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
