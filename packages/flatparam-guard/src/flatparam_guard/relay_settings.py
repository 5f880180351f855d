"""Everything of the relay that the environment can set: its numbers, whether there is one, how this host is reached."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import struct
import warnings
from typing import Final, final

import attrs

_PREFIX: Final = "FLATPARAM_RELAY"
_OFF: Final = ("0", "off", "false", "no")


def _seconds(default: float, ways: str) -> float:
    """Return a field whose `ways` is the sentence that the documentation has of it."""
    field: float = attrs.field(default=default, metadata={"ways": ways})
    return field


@final
@attrs.frozen(kw_only=True)
class RelaySettings:
    """The settings of a relay; the environment variable `FLATPARAM_RELAY_<NAME>` sets a number."""

    is_on: bool = True
    """Whether there is a relay: `FLATPARAM_RELAY`."""
    settle: float = _seconds(
        0.2, "From an exception until it is told: if the program catches it and goes on at once, nobody has to know."
    )
    mercy: float = _seconds(
        0.8, "From the news of an exception of a process that lives until nobody waits for it any longer."
    )
    forgiveness: float = _seconds(
        1.0, "From an exception that the program has caught and dropped until it is told, unless the rank goes on."
    )
    connect: float = _seconds(1.0, "The most that the first collective waits for rank 0 to be reached.")
    hub: float = _seconds(
        3.0, "The most that the other ranks wait for the relay of rank 0 until one of them takes its part."
    )
    retry: float = _seconds(
        0.02, "Between the first two attempts to reach rank 0; each further pause is twice as long."
    )
    longest_retry: float = _seconds(1.0, "The longest pause between two attempts to reach rank 0.")
    patience: float = _seconds(
        2.0, "The most that a rank whose collective has failed waits for another one to say why."
    )
    sending: float = _seconds(2.0, "The most that a message, or a connection, may take.")
    flush: float = _seconds(2.0, "The most that a process which ends waits for its failure to be told.")
    sleep: float = _seconds(
        0.5, "The longest sleep of the thread; then it looks whether an optimizer's step has raised."
    )
    stand: float = _seconds(
        0.5, "From the beginning of a wait until it is looked whether ranks wait for each other for ever."
    )
    idle: float = _seconds(
        30.0,
        "From the last collective until a rank that handles an exception of the program's own, and does nothing, has "
        "failed for the others that wait for it.",
    )
    stall: float = _seconds(
        30.0, "Ranks of a host that stay at different collectives for so long are listed in a warning of the log."
    )
    silence: float = _seconds(5.0, "Silence on a connection until the system asks whether the host is there.")
    store: float = _seconds(10.0, "The most that a call of the process group's store may take.")

    @classmethod
    def read(cls) -> RelaySettings:
        """Return the settings by the environment; a number that is none is warned of and left out."""
        found = {}
        for name in cls.variables():
            text = os.environ.get(name, "")
            if text:
                try:
                    found[cls.variables()[name]] = _positive(text)
                except ValueError:
                    warnings.warn(f"{name}: expected a number of seconds above 0, found {text!r}", stacklevel=3)
        return cls(is_on=os.environ.get(_PREFIX, "1").strip().lower() not in _OFF, **found)

    @classmethod
    def variables(cls) -> dict[str, str]:
        """Return the environment variables of the numbers, with the fields that they set."""
        names = [field.name for field in attrs.fields(cls) if "ways" in field.metadata]
        return {f"{_PREFIX}_{name.upper()}": name for name in names}


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


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
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
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
