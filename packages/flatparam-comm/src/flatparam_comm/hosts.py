"""The host that a process runs on."""

from __future__ import annotations

import contextlib
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
