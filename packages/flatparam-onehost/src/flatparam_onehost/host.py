"""The peers on this host: whether they can share memory, and whether they are alive."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import weakref
from typing import Final, final

import attrs

from flatparam_comm.errors import CommError
from flatparam_comm.hosts import host_identity
from flatparam_comm.process_group import engine, groups
from flatparam_comm.topology.transports import CannotShareError
from flatparam_onehost.segment import SharedSegment

_NEEDED: Final = ("memfd_create", "pidfd_open")


@final
class Peers:
    """The processes of a group's other ranks, each held by a descriptor that tells when it ends."""

    __slots__ = ("__weakref__", "_close", "_fds", "_poll", "pids")

    def __init__(self, pids: list[int], rank: int) -> None:
        """Hold the processes of all ranks but `rank`, which is this one."""
        self.pids = pids
        self._fds: dict[int, int] = {}
        self._poll = select.poll()
        self._close = weakref.finalize(self, _close_all, self._fds)
        for peer, pid in enumerate(pids):
            if peer != rank:
                fd = os.pidfd_open(pid)  # type: ignore[attr-defined,unused-ignore]  # not on every platform
                self._fds[fd] = peer
                self._poll.register(fd, select.POLLIN)

    def ended(self) -> list[int]:
        """Return the ranks whose processes have ended, even if nobody has waited for them yet."""
        return sorted(self._fds[fd] for fd, _ in self._poll.poll(0))

    def close(self) -> None:
        """Close the descriptors."""
        self._close()


def _close_all(fds: dict[int, int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    fds.clear()


@final
@attrs.frozen
class Link:
    """The connection of a rank to the peers that it shares memory with."""

    segment: SharedSegment
    peers: Peers

    def close(self) -> None:
        """Release the memory and the peers."""
        self.segment.close()
        self.peers.close()


@attrs.frozen
class _Offer:
    """A rank's message to the others: its obstacle, its host, its process, and the segment if it is the first rank."""

    obstacle: str
    host: tuple[str, ...]
    pid: int
    fd: int = -1
    token: tuple[int, ...] = ()


def connect(group: engine.ProcessGroupCollectives) -> Link:
    """Share memory between the ranks of `group`. Every rank of the group calls it, and all get a link, or none.

    Raises:
        CannotShareError: on every rank, if they cannot.
    """
    made: SharedSegment | None = None
    obstacle = _obstacle(group)
    host: tuple[str, ...] = ()
    if not obstacle:
        try:
            host = host_identity()
            made = SharedSegment.create(group.size) if group.rank == 0 else None
        except OSError as error:
            obstacle = f"memory cannot be shared here: {error}"
    mine = _Offer(obstacle, host, os.getpid(), made.fd if made else -1, tuple(made.token) if made else ())
    offers: list[_Offer] = group.exchange(mine, label="shared memory: offers")
    found = _first_obstacle(offers)
    link: Link | None = None
    if not found:
        try:
            link = _open(offers, group.rank, made)
            opened = ""
        except (OSError, CommError) as error:
            opened = f"its peers' memory cannot be opened: {error}"
        found = _first(group.exchange(opened, label="shared memory: opened"))
    if link is not None and not found:
        return link
    if link is not None:
        link.close()
    elif made is not None:
        made.close()
    raise CannotShareError(found)


def _obstacle(group: engine.ProcessGroupCollectives) -> str:
    if not sys.platform.startswith("linux") or not all(hasattr(os, name) for name in _NEEDED):
        return f"shared memory needs Linux (memfd_create, pidfd_open), found {sys.platform}"
    if not groups.has_cpu_backend(group.group):
        return "its process group has no backend for CPU tensors (make it with 'cpu:gloo,cuda:nccl')"
    return ""


def _first(obstacles: list[str]) -> str:
    return next((f"rank {rank}: {text}" for rank, text in enumerate(obstacles) if text), "")


def _first_obstacle(offers: list[_Offer]) -> str:
    told = _first([offer.obstacle for offer in offers])
    if told:
        return told
    for rank, offer in enumerate(offers):
        if offer.host != offers[0].host:
            return (
                f"its ranks are on several hosts or in several process namespaces: rank 0 is on {offers[0].host[1]}, "
                f"rank {rank} on {offer.host[1]}"
            )
    return ""


def _open(offers: list[_Offer], rank: int, made: SharedSegment | None) -> Link:
    first = offers[0]
    segment = made or SharedSegment.open(first.pid, first.fd, len(offers))
    if tuple(segment.token) != first.token:
        segment.close()
        raise CommError(f"process {first.pid} has other memory under descriptor {first.fd} than rank 0 made")
    return Link(segment, Peers([offer.pid for offer in offers], rank))
