"""Waits for peers that share memory: short waits spin; long ones sleep, and check whether the peers are alive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, final

import attrs

from flatparam_comm.checks import Site
from flatparam_comm.errors import CollectiveError, CommError, PeerError
from flatparam_comm.guarding import GroupMonitor
from flatparam_onehost.host import Link

#: Seconds: to spin, letting others run, before the first sleep; the longest sleep; between two checks of the peers. The
#: shortest sleep takes some 70 microseconds (timer slack): a peer that spun for less would then sleep in its turn.
_SPIN, _LONGEST, _LOOK_EVERY = 100e-6, 1e-3, 0.1
#: A sleep is this fraction of the time waited so far, so a wait is longer by no more than this fraction.
_PART: Final = 1 / 8


@final
@attrs.frozen
class Watch:
    """The waits of one rank. `members` are the ranks' numbers in the world."""

    link: Link
    calls: GroupMonitor
    members: list[int]
    rank: int
    timeout: timedelta

    def until(self, stamps: memoryview, number: int, site: Site, waits_for: int, meanwhile: Callable[[], None]) -> None:
        """Return when all `stamps`, one of each rank, have reached `number`.

        Until then `meanwhile` is called now and then; it raises if waiting is in vain.

        Args:
            waits_for: the number of the collective that every rank has to issue, or has issued.

        Raises:
            PeerError: if a missing rank's process has ended, or if the relay knows that a rank has failed.
            MismatchError: if a rank has found that ranks diverge.
            CollectiveError: if a missing rank has failed and will never arrive, or if the timeout is over.
        """
        start = time.monotonic()
        while time.monotonic() < start + _SPIN:
            if min(stamps) >= number:
                return
            os.sched_yield()
        before = self.calls.enter_wait(site, waits_for)
        try:
            self._sleep_until(stamps, number, site, meanwhile, start)
        finally:
            self.calls.end_wait(before)

    def _sleep_until(
        self, stamps: memoryview, number: int, site: Site, meanwhile: Callable[[], None], start: float
    ) -> None:
        look_at = start + _LOOK_EVERY
        while min(stamps) < number:
            now = time.monotonic()
            meanwhile()
            if now >= look_at:
                look_at = now + _LOOK_EVERY
                self._look(stamps, number, site, now - start)
            time.sleep(min(_LONGEST, (now - start) * _PART))

    def _look(self, stamps: memoryview, number: int, site: Site, waited: float) -> None:
        """Raise if a missing rank will never arrive, or if the timeout is over."""
        ended = self.link.peers.ended()
        failed = [rank for rank, word in enumerate(self.link.segment.failed) if word]
        # In this order: what a rank did before it ended or failed counts.
        missing = [rank for rank, stamp in enumerate(stamps) if stamp < number]
        if not missing:
            return
        op, label = site.op, site.label
        self.calls.check(site)
        gone = [rank for rank in missing if rank in ended or rank in failed]
        if gone:
            # Nobody need look any more whether ranks wait for each other.
            self.calls.end_wait(None)
            # It may have said why.
            self.calls.check(site, patiently=True)
        for rank in gone:
            if rank in ended:
                cause = CommError(f"its process (pid {self.link.peers.pids[rank]}) has ended")
                raise PeerError(self.members[rank], cause, waiting_rank=self.members[self.rank], op=op, label=label)
            text = f"rank {rank} no longer takes part: an earlier call failed on it, or it has closed its memory"
            raise CollectiveError(self.rank, op, label, text)
        if waited > self.timeout.total_seconds():
            text = (
                f"ranks {missing} have not arrived within {self.timeout.total_seconds():g} s; make every rank call the "
                "same collectives in the same order, or give init_process_group() a longer timeout"
            )
            raise CollectiveError(self.rank, op, label, text)
