"""Between shards and full tensors, for anything that is shaped like the parameters: weights, moments, averages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flatparam_runtime import Fragment, full_views, gather_full, memory_view
from flatparam_state.places import Place

__all__ = ["fragment_of", "fragments_of", "gather", "shard_of"]


def gather(
    place: Place, shard: torch.Tensor, *, device: torch.device | None, keep: bool = True
) -> list[torch.Tensor]:
    """Return the full tensors of which every rank holds a shard; every rank calls it.

    Args:
        shard: this rank's part, 1-D, `layout.shard_numel` elements, any dtype.
        device: where the full tensors go; `None` leaves them where the shard is.
        keep: this rank wants them; otherwise it only takes part.

    Returns:
        One tensor per parameter, in its shape, each with memory of its own; empty if `keep` is false.
        Extra memory: the flat parameter, once.
    """
    full = gather_full(place.unit, place.handle, shard)
    if not keep:
        return []
    return [_own(view, device) for view in full_views(place.handle, full)]


def _own(view: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    copy = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=device or view.device)
    return copy.copy_(view)


def fragment_of(place: Place, index: int, tensor: torch.Tensor) -> tuple[Fragment, torch.Tensor]:
    """Return this rank's part of a full tensor (the shape of parameter `index`): where it lies, and its elements.

    The elements are 1-D in memory order, a view if the tensor has that order.
    """
    layout = place.handle.layout
    fragment = layout.fragment(index, place.handle.rank)
    return fragment, memory_view(tensor, layout.slots[index].spec)[fragment.in_param.as_slice()]


def fragments_of(place: Place, tensors: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Yield this rank's part of each full tensor; see `fragment_of`."""
    for index, tensor in enumerate(tensors):
        yield None if tensor is None else fragment_of(place, index, tensor)[1]


def shard_of(place: Place, parts: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    """Lay this rank's `parts` (from `fragments_of`) out as a shard; zero if a part is missing.

    Returns:
        1-D, `layout.shard_numel` elements, dtype of the parts, on the device of `like`.
    """
    layout = place.handle.layout
    dtype = next((part.dtype for part in parts if part is not None), like.dtype)
    shard = torch.zeros(place.handle.flat_param.numel(), dtype=dtype, device=like.device)
    for fragment, part in zip(layout.fragments(place.handle.rank), parts, strict=True):
        if part is not None:
            shard[fragment.in_shard.as_slice()].copy_(part)
    return shard
