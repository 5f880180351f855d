"""The network of a host as its processes reach it: its names, and the processes that are stopped."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import struct
from pathlib import Path
from typing import Final

_INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
#: `ioctl` request for the IPv4 address of a network interface (Linux, netdevice(7)).
_SIOCGIFADDR: Final = 0x8915


def network_of_host() -> str:
    """Return the namespace of the network: in a different one, 127.0.0.1 is a different host."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def host_names() -> list[str]:
    """Return the names and addresses by which other hosts may reach this one, the likeliest first."""
    found = []
    for variable in _INTERFACE_VARIABLES:
        for interface in filter(None, os.environ.get(variable, "").split(",")):
            # Not every system has the module, or the request.
            with contextlib.suppress(OSError, ImportError):
                found.append(_address_of(interface))
    if os.environ.get("RANK") == "0" and "MASTER_ADDR" in os.environ:
        found.append(os.environ["MASTER_ADDR"])
    found.append(socket.gethostname())
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys(found))


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface."""
    fcntl = importlib.import_module("fcntl")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, packed)[20:24])


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped by a signal or a debugger, as far as the system tells (proc(5))."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The second field is the program's name in parentheses, which may hold anything.
    return told.rpartition(")")[2].split()[:1] in (["T"], ["t"])
