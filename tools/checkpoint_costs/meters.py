"""What an action costs a rank: seconds, resident memory, bytes sent and read. Linux only: most of it is in /proc."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from attrs import frozen

from flatparam_comm import ByteLedger, Collectives

T = TypeVar("T")

_CLONE_NEWNET: Final = 0x40000000
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_FORGET_PEAK: Final = "5"
"""What proc(5) wants in clear_refs, to have VmHWM begin anew."""


@frozen
class Cost:
    """What one action cost this rank; bytes, except where the name says seconds."""

    returned_s: float
    """Until the call returned."""
    done_s: float
    """Until what it had begun was finished."""
    fsync_s: float
    """Of this in fsync, in all threads."""
    peak: int
    """How far resident memory rose above what it was before."""
    wire: int
    """Sent over the loopback interface by all ranks together, with TCP's headers."""
    ledger: int
    """Sent by this rank for tensors, by flatparam's account."""
    read: int
    """Read from files (and whatever else is read with read(2))."""


@frozen
class Meter:
    """Measures actions of one rank of `group`; `ledger` is where the group's transfers are entered."""

    group: Collectives
    ledger: ByteLedger

    def measure(self, action: Callable[[], T], finish: Callable[[T], object] = lambda _: None) -> tuple[T, Cost]:
        """What `action` returned, and what it cost with `finish(it)` after it. Every rank calls it."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.ledger.reset()
        self.group.barrier()
        wire, read, resident = _wire_nbytes(), _read_nbytes(), _status("VmRSS")
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
        self.group.barrier()  # nobody begins before all have read the wire's counter
        with _timed_fsync() as fsync:
            start = time.perf_counter()
            result = action()
            returned = time.perf_counter() - start
            finish(result)
            done = time.perf_counter() - start
        self.group.barrier()
        cost = Cost(
            returned_s=returned,
            done_s=done,
            fsync_s=sum(fsync),
            peak=_status("VmHWM") - resident,
            wire=_wire_nbytes() - wire,
            ledger=self.ledger.sent_nbytes,
            read=_read_nbytes() - read,
        )
        self.group.barrier()  # nobody goes on before all have read it again
        return result, cost


def enter_private_network() -> bool:
    """Give this process, and those that it will start, a loopback interface of their own; False if that is refused."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    return True


def _wire_nbytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise LookupError("expected an interface lo in /proc/net/dev")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"expected {field} in /proc/self/status")


def _read_nbytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@contextmanager
def _timed_fsync() -> Iterator[list[float]]:
    """The seconds of each call of `os.fsync` inside, in any thread."""
    seconds: list[float] = []
    fsync, lock = os.fsync, threading.Lock()

    def timed(descriptor: int) -> None:
        start = time.perf_counter()
        fsync(descriptor)
        with lock:
            seconds.append(time.perf_counter() - start)

    os.fsync = timed  # type: ignore[assignment]  # the original also takes file objects
    try:
        yield seconds
    finally:
        os.fsync = fsync
