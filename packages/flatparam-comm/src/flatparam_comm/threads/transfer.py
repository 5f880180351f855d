"""The work on tensors in a world of threads: stage, reduce in rank order, deliver.

On an accelerator this work is asynchronous to the host, and ordered by events: each rank records one when it posts, the
stream of the last rank to post waits for all of them before it reads the inputs, and a rank's stream waits for the
result's event before it copies the result into its output. The ranks share one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from flatparam_comm.checks import Site
from flatparam_comm.collectives import ReduceOp
from flatparam_comm.errors import CollectiveError, MismatchError
from flatparam_comm.transfer.streams import follow, keep, mark


@attrs.define(eq=False)
class Cargo:
    """The tensors that one rank brings to a collective, and the point in its stream from which they can be used."""

    site: Site
    source: Tensor
    target: Tensor
    given_numels: tuple[int, ...] = ()
    """Of an all-to-all: for each rank the elements of the source that go to it."""
    output_numels: tuple[int, ...] = ()
    """Of an all-to-all: for each rank the elements that are expected from it."""
    posted: torch.Event | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.posted = mark(self.source)


@attrs.define(eq=False)
class Staged:
    """Results that are computed but not delivered yet: for each rank, the parts of its target in order.

    Parts of several ranks may be the same tensors. `ready` is the point in the last poster's stream at which they hold
    their values.
    """

    parts: list[tuple[Tensor, ...]]
    ready: torch.Event | None

    def deliver(self, rank: int, cargo: Cargo) -> None:
        """Write the result of `rank` into its target, on the current stream; raises if the target was freed."""
        parts, self.parts[rank] = self.parts[rank], ()
        follow(self.ready, cargo.target)
        _write(cargo, parts)
        for part in parts:
            # The part was allocated on the last poster's stream and is read on this one.
            keep(part)


def stage_all_gather(cargoes: Sequence[Cargo], *, late: bool) -> Staged:
    """Stage an all-gather: every rank gets every rank's source."""
    _follow_all(cargoes)
    with torch.no_grad():
        parts = tuple(cargo.source.detach().view(-1) for cargo in cargoes)
        if late:
            # One tensor for all ranks: with many ranks, copies of parts would be most of the time.
            parts = (torch.cat(parts),)
    return _staged(cargoes, [parts] * len(cargoes), late=late)


def stage_reduction(cargoes: Sequence[Cargo], op: ReduceOp, *, scatter: bool, late: bool) -> Staged:
    """Stage a reduction: every rank gets its slice of the result (`scatter`), or all of it."""
    _follow_all(cargoes)
    with torch.no_grad():
        total = _reduce([cargo.source.detach().view(-1) for cargo in cargoes], op)
        pieces: Sequence[Tensor] = [total] * len(cargoes)
        if scatter:
            # Each piece is a tensor of its own, so that a rank's piece keeps no other piece alive.
            pieces = [piece.clone() for piece in total.tensor_split(len(cargoes))]
    return _staged(cargoes, [(piece,) for piece in pieces], late=late)


def stage_all_to_all(cargoes: Sequence[Cargo], *, late: bool) -> Staged:
    """Stage an all-to-all: every rank gets its part of every rank's source.

    Raises:
        MismatchError: if a rank gives another a different number of elements than that one expects.
    """
    _follow_all(cargoes)
    _check_dealt(cargoes)
    with torch.no_grad():
        dealt = [torch.split(cargo.source.detach(), list(cargo.given_numels)) for cargo in cargoes]
        parts = [tuple(each[rank] for each in dealt) for rank in range(len(cargoes))]
        if late:
            parts = [(torch.cat(each),) for each in parts]
    return _staged(cargoes, parts, late=late)


def _check_dealt(cargoes: Sequence[Cargo]) -> None:
    for giver, cargo in enumerate(cargoes):
        for taker, given in enumerate(cargo.given_numels):
            expected = cargoes[taker].output_numels[giver]
            if given != expected:
                site = cargo.site
                raise MismatchError(
                    site.rank,
                    site.op,
                    site.label,
                    f"rank {giver} gives rank {taker} {given} elements, which expects {expected}; make every rank plan "
                    "the same transfers",
                )


def stage_broadcast(cargoes: Sequence[Cargo], root: int, *, late: bool) -> Staged:
    """Stage a broadcast: every rank but the root gets the root's source."""
    _follow_all(cargoes)
    with torch.no_grad():
        value = cargoes[root].source.detach()
        parts: tuple[Tensor, ...] = (value.clone() if late else value,)
    return _staged(cargoes, [() if rank == root else parts for rank in range(len(cargoes))], late=late)


def _staged(cargoes: Sequence[Cargo], parts: list[tuple[Tensor, ...]], *, late: bool) -> Staged:
    """Return the parts, which each rank's wait delivers (`late`), or which are delivered here."""
    if not late:
        for cargo, mine in zip(cargoes, parts, strict=True):
            _write(cargo, mine)
        parts = [()] * len(cargoes)
    return Staged(parts, mark(cargoes[0].source))


def _reduce(values: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Return the reduction ((x0 + x1) + x2) + ..., in the values' own dtype."""
    total = values[0].clone()
    for value in values[1:]:
        if op is ReduceOp.SUM:
            total += value
        elif op is ReduceOp.MAX:
            torch.maximum(total, value, out=total)
        else:
            torch.minimum(total, value, out=total)
    return total


def _write(cargo: Cargo, parts: Sequence[Tensor]) -> None:
    """Copy the parts end to end into the target."""
    if not parts:
        return
    _check_held(cargo.site, "output", cargo.target)
    flat = cargo.target.detach().view(-1)
    start = 0
    with torch.no_grad():
        for part in parts:
            stop = start + part.numel()
            piece = flat[start:stop]
            if piece.data_ptr() != part.data_ptr():
                piece.copy_(part.view(-1))
            start = stop


def _check_held(site: Site, name: str, tensor: Tensor) -> None:
    """Raise CollectiveError if the storage under the tensor was freed: the next access would be to no memory."""
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() and held < needed:
        raise CollectiveError(
            site.rank,
            site.op,
            site.label,
            f"expected the {name}'s storage to hold {needed} bytes until wait(), found {held}; "
            "it was freed while the collective was under way: wait before you free it",
        )


def _follow_all(cargoes: Sequence[Cargo]) -> None:
    """Order the current stream after every rank's post."""
    for cargo in cargoes:
        _check_held(cargo.site, "input", cargo.source)
        follow(cargo.posted, cargo.source)
