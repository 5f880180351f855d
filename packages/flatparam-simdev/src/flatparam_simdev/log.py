"""The log that the simulated device writes: a list of records, in the order in which the host called it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Final

import attrs

HOST: Final = -1
"""Stands for the host where a record names a stream."""


class Kind(enum.IntEnum):
    """The kind of thing that a record tells of. accelerator.cpp has the same numbers."""

    KERNEL = 0
    COLLECTIVE = 1
    TO_HOST = 2
    TO_DEVICE = 3
    HOST_ACCESS = 4
    """The host itself reads or writes pinned memory."""
    ALLOCATE = 5
    FREE = 6
    RECORD = 7
    WAIT = 8
    SYNC_STREAM = 9
    SYNC_EVENT = 10
    SYNC_DEVICE = 11
    QUERY = 12
    """The host has asked, without waiting, whether an event (or a stream) is over, and it is."""
    RECORD_STREAM = 13
    MARK = 14
    PRIORITY = 15
    """The priority of a stream that has one; the lower the number, the sooner it is served."""

    @property
    def runs_on_device(self) -> bool:
        """Return whether a stream of the device does it, while the host goes on."""
        return self <= Kind.TO_DEVICE

    @property
    def is_wait_of_host(self) -> bool:
        """Return whether the host stands still until the device has come so far."""
        return self in (Kind.SYNC_STREAM, Kind.SYNC_EVENT, Kind.SYNC_DEVICE)


@attrs.frozen
class Access:
    """The bytes ``[begin, end)`` of a block of memory, read or written."""

    block: int
    begin: int
    end: int
    writes: bool


@attrs.frozen
class Record:
    """One thing that happened.

    Attributes:
        stream: on which, or by which; for ALLOCATE and FREE whose pool it is; HOST for the host.
        name: the operator, the collective or the mark; for ALLOCATE and FREE "device" or "pinned".
        subject: the number of the event or of the block that it is about.
        extra: the event's version; or a number of bytes; or a priority.
        thread: of the host's threads, which.
    """

    kind: Kind
    stream: int = 0
    name: str = ""
    accesses: tuple[Access, ...] = ()
    subject: int = 0
    extra: int = 0
    thread: int = 0


def from_tuples(tuples: Iterable[tuple[Any, ...]]) -> list[Record]:
    """Return the records that the device gives, as objects."""
    return [
        Record(Kind(kind), stream, name, tuple(Access(*access) for access in accesses), *rest)
        for kind, stream, name, accesses, *rest in tuples
    ]
