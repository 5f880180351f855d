"""Helpers for the tests of anything that is built on flat parameters; they ship with the library."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatparam_core.geometry import FlatLayout, pack_shard
from flatparam_core.handle import FlatParamHandle
from flatparam_core.storage.residency import Residency

__all__ = ["check_invariants", "shards_of"]


def check_invariants(handle: FlatParamHandle) -> None:
    """Assert everything that a handle promises between two calls.

    Raises:
        AssertionError: if a promise is broken; the message names it.
    """
    sharded = handle.residency is Residency.SHARDED
    buffer = handle.buffer
    assert buffer.is_borrowed or buffer.is_allocated != sharded or buffer.nbytes == 0, (
        f"{handle!r}: a full buffer of its own is allocated exactly while the flat parameter is not sharded"
    )
    expected = handle.layout.shard_span(handle.rank).numel
    assert handle.flat_param.numel() == expected, f"{handle!r}: the shard has the layout's length"
    assert handle.flat_param.untyped_storage().size() > 0 or expected == 0, (
        f"{handle!r}: the shard always has its memory"
    )
    if handle.gradients.is_empty:
        assert all(leaf.grad is None for leaf in handle.leaves), f"{handle!r}: leaves do not keep gradients"


def shards_of(tensors: Sequence[torch.Tensor], layout: FlatLayout) -> tuple[torch.Tensor, ...]:
    """Return the shard of every rank of `layout`, packed from full `tensors` (one per slot); no rank has to run."""
    device = tensors[0].device
    return tuple(pack_shard(tensors, layout, rank=rank, device=device) for rank in range(layout.world_size))
