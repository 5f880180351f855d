"""Memory without a name, which other processes of this user can map, and which nobody can cut off under them."""

from __future__ import annotations

import importlib
import os


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
