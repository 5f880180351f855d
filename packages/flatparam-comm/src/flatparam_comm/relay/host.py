"""The processes of the ranks on this host: which host it is, and which of them have ended."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path
from typing import final

__all__ = ["Neighbours", "host_identity", "start_of"]


def host_identity() -> tuple[str, ...]:
    """A value that is equal for two processes exactly if one can find the other by its process id.

    It holds the boot of the machine and the namespace of process ids, if the system tells them, and the host's name.
    """
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    return boot, socket.gethostname(), space


def start_of(pid: int) -> str:
    """The moment at which a process began, as the system counts; empty if the process is gone or nobody tells.

    A process id is used again, but not together with this.
    """
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The second field is the program's name in parentheses, which may hold anything.
    fields = told.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


@final
class Neighbours:
    """The processes of other ranks on this host. A descriptor holds each one where the system has such descriptors."""

    __slots__ = ("_ended", "_fds", "_pids")

    def __init__(self) -> None:
        """Begin with no process."""
        self._fds: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._pids)

    def add(self, rank: int, pid: int, start: str) -> None:
        """Look after the process of `rank`, which began at `start`."""
        if rank in self._pids:
            self.remove(rank)
        self._pids[rank] = pid
        try:
            if hasattr(os, "pidfd_open"):
                self._fds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended[rank] = pid
        except OSError:
            # Too many files are open, or the system refuses: the process is looked up by its id.
            pass
        if start and start_of(pid) not in ("", start):
            self._ended[rank] = pid

    def remove(self, rank: int) -> None:
        """Look after the process of `rank` no longer."""
        self._pids.pop(rank, None)
        self._ended.pop(rank, None)
        fd = self._fds.pop(rank, None)
        if fd is not None:
            os.close(fd)

    def register(self, poll: select.poll) -> None:
        """Have `poll` return as soon as one of the processes ends."""
        for rank, fd in [*self._fds.items()]:
            if rank not in self._ended:
                poll.register(fd, select.POLLIN)

    def ended(self) -> dict[int, int]:
        """The ranks whose processes have ended, even if nobody has waited for them yet, with their process ids."""
        for rank, pid in [*self._pids.items()]:
            if rank not in self._ended and self._has_ended(rank, pid):
                self._ended[rank] = pid
        return dict(self._ended)

    def _has_ended(self, rank: int, pid: int) -> bool:
        fd = self._fds.get(rank)
        if fd is not None:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(0))
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close the descriptors."""
        for rank in [*self._pids]:
            self.remove(rank)
