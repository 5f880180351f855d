"""The identity of the host that a process runs on."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

__all__ = ["host_identity", "is_stopped"]


def host_identity() -> tuple[str, ...]:
    """A value that is equal for two processes exactly if one can find the other by its process id.

    It holds the boot of the machine and the namespace of process ids, if the system tells them, and the host's name.
    """
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    return boot, socket.gethostname(), space


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped by a signal or a debugger, as far as the system tells (proc(5))."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The second field is the program's name in parentheses, which may hold anything.
    return told.rpartition(")")[2].split()[:1] in (["T"], ["t"])
