"""The gather and the scattered sum of shards that may differ in length.

On a CPU each rank sends as much as there is: of shards of `n_r` elements, `N` in all, rank `r` of `W` sends
`(W - 1) n_r` elements in a gather, and `N - n_r` in a scattered sum, and holds `W n_r` while they are under way.
Accelerators, and decorators that change what travels, move equal parts: then shards travel in parts as long as the
longest, `W` of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatparam_comm.collectives import Collectives, ContinuedPending, Pending
from flatparam_core import FlatLayout, FlatParamError


def gather_shards(group: Collectives, layout: FlatLayout, full: Tensor, shard: Tensor, *, label: str = "") -> Pending:
    """Fill `full` with the flat parameter, of which each rank has the shard that the layout says.

    Args:
        group: the ranks that share the flat parameter.
        layout: the lengths of the shards.
        full: 1-D, `layout.numel` elements, any dtype.
        shard: 1-D, as many elements as the layout gives this rank; it may be this rank's slice of `full`.
        label: names the call in errors and ledgers.
    """
    if layout.uneven_numels:
        return gather_uneven(group, layout, full, shard, label=label)
    if not layout.is_chunked:
        return group.all_gather(full, shard, label=label)
    shards = torch.empty_like(full)
    return ContinuedPending(group.all_gather(shards, shard, label=label), lambda: layout.chunks.spread(full, shards))


def gather_uneven(group: Collectives, layout: FlatLayout, full: Tensor, shard: Tensor, *, label: str = "") -> Pending:
    """Do what `gather_shards` does of shards that differ in length."""
    if _takes_any_lengths(group, full):
        return group.all_to_all(
            full,
            shard.detach().repeat(group.size),
            output_numels=layout.shard_numels,
            given_numels=[shard.numel()] * group.size,
            label=label,
        )
    longest = max(layout.shard_numels)
    staged = full.new_zeros(group.size * longest)
    mine = staged[group.rank * longest :][:longest]
    mine[: shard.numel()].copy_(shard)

    @torch.no_grad()
    def copy() -> None:
        for own, part in _parts(layout, full, staged):
            own.copy_(part)

    return ContinuedPending(group.all_gather(staged, mine, label=label), copy)


def scatter_sums(group: Collectives, layout: FlatLayout, output: Tensor, full: Tensor, *, label: str = "") -> Pending:
    """Fill `output` with this rank's part of the sum of every rank's `full`, in which shards differ in length.

    Args:
        group: the ranks that share the flat parameter.
        layout: the lengths of the shards.
        output: 1-D, as many elements as the layout gives this rank.
        full: 1-D, `layout.numel` elements, of the dtype of `output`.
        label: names the call in errors and ledgers.
    """
    if _takes_any_lengths(group, full):
        return _exchanged_and_added(group, layout, output, full, label)
    longest = max(layout.shard_numels)
    staged = full.new_zeros(layout.world_size * longest)
    for own, part in _parts(layout, full, staged):
        part.copy_(own)
    target = full.new_empty(longest)

    @torch.no_grad()
    def take() -> None:
        output.copy_(target[: output.numel()])

    return ContinuedPending(group.reduce_scatter(target, staged, label=label), take)


def _exchanged_and_added(group: Collectives, layout: FlatLayout, output: Tensor, full: Tensor, label: str) -> Pending:
    received = full.new_empty(group.size * output.numel())

    @torch.no_grad()
    def add() -> None:
        first, *others = received.view(group.size, -1).unbind()
        output.copy_(first)
        for other in others:
            # In rank order, as every engine adds.
            output.add_(other)

    pending = group.all_to_all(
        received, full, output_numels=[output.numel()] * group.size, given_numels=layout.shard_numels, label=label
    )
    return ContinuedPending(pending, add)


def _takes_any_lengths(group: Collectives, tensor: Tensor) -> bool:
    """Return whether parts of different lengths of `tensor` may travel through `group` as they are."""
    return tensor.device.type == "cpu" and not getattr(group, "needs_equal_parts", False)


def _parts(layout: FlatLayout, full: Tensor, staged: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each rank its slice of the flat tensor, and the part of `staged` in which it travels."""
    longest = staged.numel() // layout.world_size
    spans = map(layout.shard_span, range(layout.world_size))
    return [(full[span.as_slice()], staged[rank * longest :][: span.numel]) for rank, span in enumerate(spans)]


def check_even(layout: FlatLayout, hook: str) -> None:
    """Check that a hook in the place of a collective gets equal parts, end to end, as it takes for granted.

    Raises:
        FlatParamError: if the shards differ in length; the message names `hook`.
    """
    if layout.uneven_numels:
        raise FlatParamError(
            f"{layout.fqns[0]!r}, ...: the shards have from {min(layout.shard_numels)} to {max(layout.shard_numels)} "
            f"elements, and {hook} takes equal ones; leave out the hook, or the shares of the layout"
        )
