"""From full parameters to the part of them that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatparam_core.geometry.layout import FlatLayout
from flatparam_core.geometry.specs import memory_view

__all__ = ["pack_parameter", "pack_shard"]


def pack_shard(
    tensors: Sequence[torch.Tensor], layout: FlatLayout, *, rank: int, device: torch.device
) -> torch.Tensor:
    """Return this rank's shard of the flat parameter that `tensors` (one per slot) make up, 1-D; padding is zero.

    Only the rank's own part is copied: no flat buffer of the whole unit is made.
    """
    shard = torch.zeros(layout.shard_span(rank).numel, dtype=layout.dtype, device=device)
    for index, tensor in enumerate(tensors):
        pack_parameter(shard, layout, index, tensor, rank=rank)
    return shard


def pack_parameter(
    shard: torch.Tensor, layout: FlatLayout, index: int, tensor: torch.Tensor, *, rank: int
) -> None:
    """Copy this rank's part of parameter `index`, whose full value is `tensor`, to its place in `shard`."""
    fragment = layout.fragments(rank)[index]
    if fragment.in_param:
        flat = memory_view(tensor, layout.slots[index].spec)
        shard[fragment.in_shard.as_slice()].copy_(flat[fragment.in_param.as_slice()])
