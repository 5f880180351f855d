"""The host that a process runs on, and memory that its processes share."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from pathlib import Path


def host_identity() -> tuple[str, ...]:
    """Return a value that is equal for two processes exactly if one can find the other by its process id.

    It holds the boot of the machine and the namespace of process ids, if the system tells them, and the host's name.
    """
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    return boot, socket.gethostname(), space


def make_sealed_memory(name: str, nbytes: int) -> int:
    """Return the descriptor of a new file in memory, all zeros; pages that nobody writes take none.

    Only its user can open it, and its size is sealed: a process that maps it cannot be killed by another one that
    truncates it.

    Raises:
        OSError, AttributeError: if the system has no such memory, or gives none.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.truncate(fd, nbytes)
        # Not every platform has the module.
        fcntl = importlib.import_module("fcntl")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd
