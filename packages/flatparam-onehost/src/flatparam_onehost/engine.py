"""The engine for ranks of one host: bytes go through memory that all of them have mapped.

A collective takes the next number and with it the next slot, in turn. A rank that issues it copies the bytes that the
others need into the slot and posts the number. The wait lasts until every rank has posted, then takes the result and
posts that this rank is done with the slot. The last rank to issue the collective need not wait and takes the result at
once. There are no threads: each rank empties a slot when it issues the next collective that needs it, so ranks may wait
in any order.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor

from flatparam_comm import checks
from flatparam_comm.checks import Site
from flatparam_comm.collectives import Collectives, Parts, Pending, ReduceOp
from flatparam_comm.errors import CollectiveError, CommError, MismatchError, describe_call
from flatparam_comm.guarding import monitor_of
from flatparam_comm.process_group import groups
from flatparam_comm.process_group.engine import ProcessGroupCollectives
from flatparam_comm.process_group.groups import exchange_bytes
from flatparam_comm.topology.transports import CannotShareError, as_process_group
from flatparam_onehost.host import Link, connect
from flatparam_onehost.moves import REDUCTIONS, Deal, PostedCall, Scatter
from flatparam_onehost.pending import NOTHING, SharedPending, SlotUse
from flatparam_onehost.segment import SLOTS
from flatparam_onehost.waiting import Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: x86 shows one core's writes to the other cores in the order in which they were made.
_KEEPS_ORDER: Final = platform.machine().lower() in ("x86_64", "amd64", "i686")
#: The timeout of torch, if a backend does not tell its own.
_DEFAULT_TIMEOUT: Final = timedelta(minutes=30)
_NO_MODE: Final = contextlib.nullcontext()
_CPU: Final = torch.device("cpu")
_WORD: Final = struct.Struct("q")


@final
class SharedMemoryCollectives:
    """Collectives between processes of one host, for CPU tensors; make them with `shared_memory`.

    `inner` is the process group: CUDA tensors go through it, and subgroups are made from it. Sums are added in rank
    order, so they have the same bits in every run and in `run_threads`. If a peer dies while others wait for it, each
    of them raises `PeerError` within a second; if a peer does not arrive within the process group's timeout, they raise
    a `CollectiveError` that names it; if ranks diverge, they raise `MismatchError`. After any of these, every further
    call raises at once. Only one thread at a time may use this object.
    """

    __slots__ = (
        "__weakref__",
        "_calls",
        "_failure",
        "_fence",
        "_link",
        "_rank",
        "_ring",
        "_sequence",
        "_size",
        "_thread",
        "_watch",
        "inner",
    )

    def __init__(self, inner: ProcessGroupCollectives, link: Link) -> None:
        """Make the end of this rank, over the memory that `link` holds."""
        self.inner = inner
        self._rank, self._size = inner.rank, inner.size
        self._link = link
        self._ring = [SlotUse(slot, self._rank, self._size) for slot in link.segment.slots]
        self._sequence = 0
        self._thread = threading.get_ident()
        self._failure: CommError | None = None
        self._fence = threading.Lock()
        timeout = groups.timeout_of(inner.group) or _DEFAULT_TIMEOUT
        self._calls = monitor_of(
            inner.group, "shared memory", lambda offer: inner.exchange(offer, label="shared memory: positions")
        )
        self._watch = Watch(link, self._calls, groups.members_of(inner.group), self._rank, timeout)

    def __repr__(self) -> str:
        return f"SharedMemoryCollectives(rank={self.rank}, size={self.size})"

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        return self._size

    @property
    def held_nbytes(self) -> int:
        """The bytes of shared memory that the group holds, for all of its ranks together.

        A page of control words (more from about 40 ranks on), and for each of the two slots the most that one
        collective needed in it, in whole pages: for n ranks and a buffer of T bytes, T for an all-gather and for a
        broadcast, (n - 1) T for a reduce-scatter, n T for an all-reduce; for an exchange n times the longest pickle.
        Collectives take the slots in turn.
        """
        return self._link.segment.held_nbytes

    @property
    def has_failed(self) -> bool:
        """Whether every call raises, since a call has failed or the memory was closed."""
        return self._failure is not None

    @property
    def is_closed(self) -> bool:
        """Whether the memory was closed, by `close` or with its process group."""
        return not self._ring

    def close(self) -> None:
        """Release the shared memory; the process group stays. When the process group is gone, this happens by itself.

        Wait for all pendings first. Further calls raise `CommError`.
        """
        self._fail(
            CommError(
                "expected shared memory that is open, found it closed: use it before close() and before "
                "destroy_process_group()"
            )
        )
        # Each pending keeps its slot.
        self._ring = []
        self._link.close()

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Gather through shared memory, and through the process group off the CPU."""
        site = Site(self._rank, self._size, "all_gather", label)
        checks.check_all_gather(site, output, shard)
        if not output.is_cpu:
            return self.inner.all_gather(output, shard, label=label)
        return self._start(site, _plain(output), _plain(shard))

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Add in rank order, in the dtype of `full`; off the CPU the process group does."""
        site = Site(self._rank, self._size, "reduce_scatter", label)
        checks.check_reduce_scatter(site, output, full, op)
        if not output.is_cpu:
            return self.inner.reduce_scatter(output, full, op=op, label=label)
        return self._start(site, _plain(output), _plain(full), REDUCTIONS[op])

    def reduce_scatter_parts(self, output: Tensor, full: Parts, *, label: str = "") -> Pending:
        """Add in rank order, in the dtype of `full`, whose parts go straight to shared memory."""
        site = Site(self._rank, self._size, "reduce_scatter", label)
        checks.check_reduce_scatter_parts(site, output, full)
        return self._start(site, output, full, REDUCTIONS[ReduceOp.SUM])

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Add in rank order, in the tensor's dtype; off the CPU the process group does."""
        site = Site(self._rank, self._size, "all_reduce", label)
        checks.check_all_reduce(site, tensor, op)
        if not tensor.is_cpu:
            return self.inner.all_reduce(tensor, op=op, label=label)
        flat = _plain(tensor)
        return self._start(site, flat, flat, REDUCTIONS[op])

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Copy the tensor of `root`, a rank of this group, through shared memory."""
        site = Site(self._rank, self._size, "broadcast", label)
        checks.check_broadcast(site, tensor, root)
        if not tensor.is_cpu:
            return self.inner.broadcast(tensor, root=root, label=label)
        flat = _plain(tensor)
        return self._start(site, flat, flat, root)

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Go through the process group: no rank knows how long a slot would have to be."""
        if self._failure is not None:
            raise self._again(Site(self._rank, self._size, "all_to_all", label))
        return self.inner.all_to_all(output, given, output_numels=output_numels, given_numels=given_numels, label=label)

    def swap(self, output: Tensor, given: Tensor | Parts, *, label: str = "") -> Pending:
        """Do what `all_to_all` does with parts of one length, which goes through shared memory.

        Args:
            output: 1-D, of as many elements as `given`; the part of rank 0 comes first.
            given: 1-D; the part for rank 0 comes first, and each has as many elements. It may lie in parts.
            label: names the call in errors.
        """
        numels = [output.numel() // self._size] * self._size
        site = Site(self._rank, self._size, "all_to_all", label)
        if not isinstance(given, Tensor):
            checks.check_reduce_scatter_parts(site, output[: numels[0]], given)
            return self._start(site, output, given)
        if not output.is_cpu:
            return self.inner.all_to_all(output, given, output_numels=numels, given_numels=numels, label=label)
        checks.check_all_to_all(site, output, given, numels, numels)
        return self._start(site, _plain(output), _plain(given))

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Exchange pickled values through shared memory."""
        site = Site(self._rank, self._size, "exchange", label)
        try:
            mine = pickle.dumps(value)
        except Exception as error:
            text = f"the value cannot be pickled: {type(error).__name__}: {error}"
            raise CollectiveError(site.rank, site.op, site.label, text) from error
        gathered = exchange_bytes(mine, self._size, lambda output, shard: self._start(site, output, shard).wait(), _CPU)
        return [pickle.loads(each) for each in gathered]

    def barrier(self, *, label: str = "") -> None:
        """Wait for every rank, through shared memory."""
        self._meet("barrier", label)

    def subgroup(self, ranks: Sequence[int]) -> SharedMemoryCollectives | ProcessGroupCollectives | None:
        """Make a group that shares memory, too, unless the system gives it no more."""
        chosen = checks.check_subgroup(Site(self._rank, self._size, "subgroup", ""), ranks)
        self._meet("subgroup", "")
        made = self.inner.subgroup(chosen)
        if made is None:
            return None
        try:
            return connected(made)
        except CannotShareError:
            return made

    def _meet(self, op: str, label: str) -> None:
        self._start(Site(self._rank, self._size, op, label), NOTHING, NOTHING).wait()

    def _start(self, site: Site, target: Tensor, source: Tensor | Parts, detail: int = 0) -> SharedPending:
        """Take the next number and its slot, put this rank's part there, and post the number."""
        if self._failure is not None:
            raise self._again(site)
        # It may have to wait for a peer to be done with an earlier collective in the slot.
        self._calls.note(site, source.dtype, source.numel(), detail)
        use = self._ring[(self._sequence + 1) % SLOTS]
        if use.pending is not None:
            self.finish(use.pending)
        if use.slot.consumed.tobytes() != _WORD.pack(use.number) * self._size:
            # A peer may empty the slot only when it issues the same as this rank does now.
            self._wait(site, use.slot.consumed, use.number, waits_for=self._sequence + 1)
        posted, at = use.slot.posted, 2 * self._rank
        try:
            move, code = use.move(site.op, source.dtype, source.numel(), detail)
            posted[at] = code
            if isinstance(source, Tensor):
                move.put(source)
            else:
                assert isinstance(move, (Scatter, Deal)), "these take parts"
                move.put_parts(source, target)
                source = target
        except Exception as error:
            # The number is never posted, and the peers would wait for it.
            raise self._unable(site, error) from error
        if not _KEEPS_ORDER:
            self._order_memory()
        posted[at + 1] = self._sequence = use.number = self._sequence + 1
        self._thread = threading.get_ident()
        use.pending = pending = SharedPending(self, use, site, move, code, target, source)
        if use.all_posted(code):
            # This rank is the last: the bytes are in its cache, and no peer has to wait for its `wait()`.
            self.finish(pending)
        return pending

    def finish(self, pending: SharedPending) -> None:
        """Wait for the peers, take the result, and release the slot; `pending.wait()` calls this."""
        use, move = pending.use, pending.move
        if move is None or pending.error is not None:
            return pending.wait()
        if self._failure is not None:
            pending.fail(self._again(pending.site))
            return pending.wait()
        try:
            if not use.all_posted(pending.code):
                self._wait(
                    pending.site, use.slot.stamps, use.number, lambda: self._compare(pending), waits_for=use.number
                )
                if pending.move is None:
                    # The pending was finished during the wait for the peers.
                    return pending.wait()
                self._compare(pending)
            pending.check_held()
            if not _KEEPS_ORDER:
                self._order_memory()
            # An output of inference mode can only be written to in that mode, even if the wait is outside of it.
            with torch.inference_mode() if pending.target.is_inference() else _NO_MODE:
                move.take(pending.target, pending.source)
        except CommError as error:
            pending.fail(error)
            self._fail(error)
            raise
        if not _KEEPS_ORDER:
            self._order_memory()
        use.slot.consumed[self._rank] = use.number
        pending.release()
        return None

    def _wait(
        self, site: Site, stamps: memoryview, number: int, check: Callable[[], None] | None = None, *, waits_for: int
    ) -> None:
        def meanwhile() -> None:
            if check is not None:
                check()
            _progress()

        try:
            self._watch.until(stamps, number, site, waits_for, meanwhile)
        except CommError as error:
            self._fail(error)
            raise

    def finish_ready(self) -> None:
        """Finish the calls of this thread that every rank has posted, so that no peer waits for this rank."""
        if self._thread != threading.get_ident():
            # Another thread may be using this group at this very moment.
            return
        for use in self._ring:
            pending = use.pending
            if pending is not None and use.all_posted(pending.code) and self._failure is None:
                # The pending keeps the error, and raises it at its wait.
                with contextlib.suppress(CommError):
                    self.finish(pending)

    def _compare(self, pending: SharedPending) -> None:
        """Raise MismatchError if a rank that has posted called something else."""
        slot, number = pending.use.slot, pending.use.number
        codes = {
            rank: code
            for rank, (stamp, code) in enumerate(zip(slot.stamps.tolist(), slot.calls.tolist(), strict=True))
            if stamp >= number
        }
        if any(code != pending.code for code in codes.values()):
            told = "; ".join(f"rank {rank} called {PostedCall.of(code)}" for rank, code in codes.items())
            site = pending.site
            raise MismatchError(
                site.rank,
                site.op,
                site.label,
                f"the ranks' calls differ: {told}; make every rank call the same collectives, of the same sizes, in "
                "the same order",
            )

    def _fail(self, error: CommError) -> None:
        """Make every later call fail: here at once, and on the others when they wait for this rank."""
        if self._failure is None:
            self._failure = error
            if isinstance(error, MismatchError):
                self._calls.tell(error)
            self._link.segment.failed[self._rank] = 1

    def _unable(self, site: Site, error: Exception) -> CollectiveError:
        """The error of a rank that cannot take part in a collective, as when there is no memory; its peers are told."""
        text = f"this rank cannot take part: {type(error).__name__}: {error}"
        if isinstance(error, (OSError, MemoryError)):
            text += "; free memory, or give its process more (ulimit -v, the limit of its container)"
        failure = CollectiveError(site.rank, site.op, site.label, text)
        self._calls.tell(failure)
        self._fail(failure)
        return failure

    def _again(self, site: Site) -> CommError:
        """Return the error of every call after a failure."""
        failure = self._failure
        if not isinstance(failure, CollectiveError):
            return CommError(f"rank {site.rank}: {describe_call(site.op, site.label)}: {failure}")
        error = CollectiveError(site.rank, site.op, site.label, f"an earlier call failed: {failure}")
        error.__cause__ = failure
        return error

    def _order_memory(self) -> None:
        """Let no write before this become visible after a later write, and no later read happen before this.

        A lock is acquired and released twice: accesses before the first release stay before it, accesses after the
        second acquisition stay after it, and the two do not change places.
        """
        for _ in range(2):
            with self._fence:
                pass


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor as a 1-D view that autograd does not track."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def shared_memory(group: ProcessGroup | Collectives) -> SharedMemoryCollectives:
    """Return the collectives of `group` through shared memory; the same object each time for a process group.

    Args:
        group: a process group of ranks that are all on this host, or the collectives over one. Every rank of it calls
            this.

    Raises:
        ValueError: on every rank, if the ranks cannot share memory; it says what is missing.
    """
    if isinstance(group, SharedMemoryCollectives):
        return group
    try:
        return connected(as_process_group(group))
    except CannotShareError as error:
        raise ValueError(
            f"expected ranks that can share memory, found that they cannot: {error}; pass the process group itself, "
            "or 'auto' to share memory only if the ranks can"
        ) from None


def connected(group: ProcessGroupCollectives) -> SharedMemoryCollectives:
    """Return the collectives of `group` through shared memory; every rank calls it.

    Raises:
        CannotShareError: on every rank, if they cannot share memory.
    """
    key = group.group
    known = _CONNECTED.get(key)
    if known is not None and not known.is_closed:
        return known
    if key in _OBSTACLES:
        raise CannotShareError(_OBSTACLES[key])
    try:
        known = _CONNECTED[key] = SharedMemoryCollectives(group, connect(group))
    except CannotShareError as error:
        _OBSTACLES[key] = str(error)
        raise
    weakref.finalize(key, _close, weakref.ref(known)).atexit = False
    return known


def is_shared(group: Collectives | None) -> bool:
    """Return whether `group` works over shared memory."""
    return isinstance(group, SharedMemoryCollectives)


#: What was found for each process group, so that ranks that ask again agree that there is nothing to make.
_CONNECTED: Final[weakref.WeakKeyDictionary[ProcessGroup, SharedMemoryCollectives]] = weakref.WeakKeyDictionary()
_OBSTACLES: Final[weakref.WeakKeyDictionary[ProcessGroup, str]] = weakref.WeakKeyDictionary()


def _progress() -> None:
    """Finish what is ready in every group: ranks may wait for several groups in different orders."""
    for shared in [*_CONNECTED.values()]:
        shared.finish_ready()


def _close(reference: weakref.ReferenceType[SharedMemoryCollectives]) -> None:
    shared = reference()
    if shared is not None:
        shared.close()


def _disown() -> None:
    """Make every call raise in a forked process, as the memory belongs to the parent."""
    for shared in [*_CONNECTED.values()]:
        shared._failure = CommError(
            "expected the process in which the ranks were connected, found one forked from it; call collectives "
            "only in the process that is the rank"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)
