"""The gather of full parameters, from its issue until its bytes are used or dropped."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias, final

import attrs
from torch import Tensor

from flatparam_comm.collectives import COMPLETED, Collectives, Pending, let_end
from flatparam_comm.transfer.streams import Copies, Mark, streams_of
from flatparam_comm.transfer.uneven import check_even, gather_uneven
from flatparam_core import FlatLayout, FlatParamHandle, Residency

Hook: TypeAlias = Callable[[Tensor, Tensor], None]
_IS_OFFLOADED: Final = operator.attrgetter("is_offloaded")
_AT_ONCE: Final = contextlib.nullcontext(Copies())
"""The context of copies that are made at once."""


class OwnGather(Protocol):
    """A unit's own way to gather what it computes with; add-ons have some."""

    @property
    def rounds(self) -> bool:
        """Tell whether what it gathers may differ from what the shards have."""

    def gather(
        self, group: Collectives, layout: FlatLayout, full: Tensor, shard: Tensor, label: str, hook: Any
    ) -> Pending | None:
        """Issue the gather of `full`, of which `layout` says the shards; None if it is better done as usual."""


@final
@attrs.define(eq=False)
class Gather:
    """The gather of the full parameters of some flat parameters from the shards of all ranks of a group.

    It holds the collectives under way. Its owner finishes it, which shows the full parameters, or drops it, which frees
    them. Both wait first: memory must not be freed while bytes are being written to it.
    """

    handles: Sequence[FlatParamHandle]
    stamp: int = 0
    """The sum of the handles' stamps when it was issued: a different sum later means that the shards have changed."""
    is_rounded: bool = False
    """Whether the full parameters may have been rounded on their way."""
    _pending: list[Pending | Mark] = attrs.field(factory=list)

    @classmethod
    def issue(
        cls,
        handles: Sequence[FlatParamHandle],
        group: Collectives,
        *,
        label: str = "",
        full_precision: bool = False,
        copied: bool = False,
        take_over: bool = True,
        hook: Hook | None = None,
        own: OwnGather | None = None,
    ) -> Gather:
        """Issue one all-gather for each of `handles`, which are sharded over `group`.

        Args:
            handles: at least one, all on one device; their full parameters are not in memory.
            label: names the call in errors and ledgers.
            full_precision: gather the parameters in their own dtype, whatever the compute dtype.
            copied: gather into memory of their own, even if nothing is sharded.
            take_over: check whether the user has given a parameter different data; see `FlatParamHandle.taken_over`.
            hook: called with `(shard, full)` instead of the all-gather.
            own: gathers in its own way, if it can.

        Raises:
            CollectiveError: if a collective cannot be issued. Those before it are then waited for; nothing is kept.
        """
        gather = cls(handles, is_rounded=own is not None and own.rounds)
        options = {"full_precision": full_precision, "copied": copied}
        try:
            # On an accelerator, shards are copied beside the computation. The memory that they are copied to is
            # allocated on the compute stream, and is reused there.
            beside = streams_of(handles[0].forms.device)
            moves = beside.runs_ahead or any(map(_IS_OFFLOADED, handles))
            uploads = moves and any([handle.reserve(**options) for handle in handles])
            with beside.uploading() if uploads else _AT_ONCE as copies:
                for handle in handles:
                    full, shard = handle.begin_unshard(take_over=take_over, **options)
                    gather.stamp += handle.gathered
                    pending = gather_one(group, handle.forms.layout, full, shard, label, hook, own)
                    gather._pending.append(pending)
            if copies.end is not None:
                gather._pending.append(copies.end)
        except BaseException:
            gather._abandon()
            raise
        return gather

    def _abandon(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.wait()
        for handle in self.handles:
            if handle.residency is Residency.UNSHARDING:
                handle.reshard()
            handle.unreserve()

    def wait(self) -> None:
        """Wait until every byte is in its place; on an accelerator, order the current stream after that.

        Raises:
            CollectiveError: the first error of a collective, once all of them are over.
        """
        pending, self._pending = self._pending, []
        errors = []
        for each in pending:
            try:
                each.wait()
            # The other collectives write to memory that is about to be freed, so wait for them, too.
            except RuntimeError as error:
                errors.append(error)
            except BaseException:
                let_end(pending)
                raise
        if errors:
            raise errors[0]

    def finish(self) -> None:
        """Wait, and make the modules show the full parameters."""
        self.wait()
        for handle in self.handles:
            handle.finish_unshard()

    def drop(self) -> None:
        """Wait, and free the full parameters; those that modules show are replaced by the sharded form."""
        if self._pending:
            self.wait()
        for handle in self.handles:
            if handle.residency is not Residency.SHARDED:
                handle.reshard()


def gather_one(
    group: Collectives,
    layout: FlatLayout,
    full: Tensor,
    shard: Tensor,
    label: str,
    hook: Hook | None,
    own: OwnGather | None,
) -> Pending:
    """Issue the gather of one flat parameter, `full`, whose shards `layout` says; the rest is as for `Gather.issue`."""
    pending = None if own is None else own.gather(group, layout, full, shard, label, hook)
    if pending is not None:
        return pending
    if hook is not None:
        check_even(layout, "the hook in the place of the all-gather")
        hook(shard, full)
        return COMPLETED
    if layout.uneven_numels:
        return gather_uneven(group, layout, full, shard, label=label)
    return group.all_gather(full, shard, label=label)
