"""The connections between the relays: rank 0 listens, the others connect to it, and it passes on what each one says.

Nothing is sent while all is well. A connection ends with its process, so a rank that is killed is noticed at once; the
system's keepalive packets notice a host that is gone. Rank 0 leaves its address, and a secret, in the store.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, Final, final

import attrs

from flatparam_comm.relay.host import host_identity
from flatparam_comm.relay.settings import RelaySettings

__all__ = ["CLOSED", "Ended", "Said", "Star"]

#: The reason of an end that the other process, or its system, has told of.
CLOSED: Final = "the connection was closed"
_KEY: Final = "address"
#: Keepalive packets without an answer until a host is gone.
_UNANSWERED: Final = 3
_INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
#: `ioctl` request for the IPv4 address of a network interface (Linux, netdevice(7)).
_SIOCGIFADDR: Final = 0x8915


@final
@attrs.frozen
class Said:
    """The words of `rank`: a dictionary of plain values."""

    rank: int
    words: dict[str, Any]


@final
@attrs.frozen
class Ended:
    """The end of the connection to `rank`, for a `reason` that the system gave; it was closed, or it was lost."""

    rank: int
    reason: str


@final
@attrs.define(eq=False)
class _Line:
    """One connection to one rank, with the bytes of a line that has not ended yet."""

    socket: socket.socket
    rank: int = -1
    buffer: bytearray = attrs.field(factory=bytearray)
    lost: str = ""
    """Why a message could not be sent, which the system says only once."""

    def send(self, message: bytes) -> bool:
        """Send a whole line; returns whether that was possible."""
        try:
            self.socket.sendall(message)
        except OSError as error:
            self.lost = self.lost or str(error.strerror or error)
            return False
        return True

    def receive(self) -> tuple[list[dict[str, Any]], str | None]:
        """The messages that have arrived, and why no more will come, if so."""
        reason: str | None = None
        try:
            data = self.socket.recv(1 << 16)
            if not data:
                reason = f"the connection was lost: {self.lost}" if self.lost else CLOSED
        except OSError as error:
            # The socket's own timeout has no number; that of the system, which asked in vain, has one.
            data = b""
            if not isinstance(error, TimeoutError) or error.errno is not None:
                reason = f"the connection was lost: {error.strerror}"
        self.buffer += data
        *lines, rest = bytes(self.buffer).split(b"\n")
        self.buffer[:] = rest
        return [json.loads(line) for line in lines], reason


@final
class Star:
    """The connection of this rank to all others, for one thread (but `wake`, which any thread may call)."""

    def __init__(self, rank: int, store: Any, settings: RelaySettings) -> None:
        """Prepare; `store` is a connection of its own to the store of the group."""
        self._rank = rank
        self._store = store
        self._settings = settings
        self._lines: dict[int, _Line] = {}
        self._listener: socket.socket | None = None
        self._secret = ""
        self._last: dict[int, bytes] = {}
        self._mine: list[bytes] = []
        self._next_try = 0.0
        self._retry = settings.retry
        self._ears, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ears, False)

    @property
    def is_connected(self) -> bool:
        """Whether this rank hears any other one."""
        return bool(self._lines)

    def open(self) -> None:
        """Begin: rank 0 listens, and says where."""
        if self._rank == 0:
            self._listener = _listen()
            self._secret = secrets.token_hex(16)
            port = self._listener.getsockname()[1]
            told = {"host": host_identity(), "space": _network(), "names": _names(), "port": port}
            self._store.set(_KEY, json.dumps({**told, "secret": self._secret}))

    def say(self, words: dict[str, Any]) -> None:
        """Send words to every other rank; those that connect later get the last ones of each rank."""
        message = _encode(self._rank, words)
        self._mine.append(message)
        self._last[self._rank] = message
        self._send_mine()

    def say_for(self, rank: int, words: dict[str, Any]) -> None:
        """On rank 0: send words to every other rank in place of `rank`, whose connection has ended."""
        self._pass_on(rank, words)

    def listen(self, timeout: float) -> Iterator[Said | Ended]:
        """Wait for what the others say, for a call of `wake` or for `timeout` seconds."""
        if self._rank != 0 and not self._lines and self._store is not None:
            self._try_to_connect()
            timeout = min(timeout, self._retry)
        poll = select.poll()
        poll.register(self._ears, select.POLLIN)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        by_fd = {line.socket.fileno(): line for line in self._lines.values()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(max(0.0, timeout * 1e3)):
            if fd == self._ears:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._ears, 4096)
            elif fd in by_fd:
                yield from self._hear(by_fd[fd])
            else:
                self._accept()

    def wake(self) -> None:
        """Have `listen` return."""
        with contextlib.suppress(OSError):
            os.write(self._bell, b"!")

    def close(self) -> None:
        """Close every connection, after what was sent on it."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.socket.shutdown(socket.SHUT_WR)
        if self._listener is not None:
            # Whoever holds the store may be gone.
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(_KEY)
        self.drop()

    def drop(self) -> None:
        """Close every descriptor at once, as a forked process has to: the connections are its parent's."""
        for line in self._lines.values():
            line.socket.close()
        self._lines = {}
        if self._listener is not None:
            self._listener.close()
        self._listener = self._store = None
        if self._ears >= 0:
            os.close(self._ears)
            os.close(self._bell)
        self._ears = self._bell = -1

    def _hear(self, line: _Line) -> Iterator[Said | Ended]:
        said, reason = line.receive()
        for message in said:
            rank = int(message["rank"])
            if self._rank == 0:
                self._pass_on(rank, message["words"])
            yield Said(rank, message["words"])
        if reason is not None:
            line.socket.close()
            del self._lines[line.rank]
            yield Ended(line.rank, reason)

    def _pass_on(self, rank: int, words: dict[str, Any]) -> None:
        encoded = self._last[rank] = _encode(rank, words)
        for other, line in self._lines.items():
            if other != rank:
                line.send(encoded)

    def _accept(self) -> None:
        assert self._listener is not None, "only rank 0 is connected to"
        with contextlib.suppress(OSError, ValueError, KeyError):
            connection, _ = self._listener.accept()
            _prepare(connection, self._settings)
            hello = json.loads(_read_line(connection))
            if not secrets.compare_digest(str(hello["secret"]), self._secret):
                connection.close()
                return
            line = self._lines[int(hello["rank"])] = _Line(connection, int(hello["rank"]))
            for rank, message in self._last.items():
                if rank != line.rank:
                    line.send(message)

    def _try_to_connect(self) -> None:
        now = time.monotonic()
        if now < self._next_try:
            return
        self._next_try = now + self._retry
        self._retry = min(2 * self._retry, self._settings.longest_retry)
        if not self._store.check([_KEY]):
            return
        told = json.loads(self._store.get(_KEY))
        is_here = tuple(told["host"]) == host_identity() and told["space"] == _network()
        for name in ["127.0.0.1"] if is_here else told["names"]:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((name, told["port"]), timeout=self._settings.sending)
                _prepare(connection, self._settings)
                hello = json.dumps({"secret": told["secret"], "rank": self._rank}).encode() + b"\n"
                connection.sendall(hello)
                self._lines[0] = _Line(connection, 0)
                self._store = None
                self._send_mine()
                return

    def _send_mine(self) -> None:
        if self._lines:
            for message in self._mine:
                for line in self._lines.values():
                    line.send(message)
            self._mine = []
        elif self._rank == 0:
            self._mine = []


def _encode(rank: int, words: dict[str, Any]) -> bytes:
    return json.dumps({"rank": rank, "words": words}).encode() + b"\n"


def _listen() -> socket.socket:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=family == socket.AF_INET6)


def _prepare(connection: socket.socket, settings: RelaySettings) -> None:
    connection.settimeout(settings.sending)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence = max(1, round(settings.silence))
    # Seconds before the first packet, and between two.
    for name, value in (("TCP_KEEPIDLE", silence), ("TCP_KEEPINTVL", silence), ("TCP_KEEPCNT", _UNANSWERED)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    # While something that was sent waits for its answer, the system asks nothing, and sends it again for many minutes.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        limit = 1000 * silence * (1 + _UNANSWERED)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)


def _read_line(connection: socket.socket) -> bytes:
    """The first line of a connection, byte by byte: what follows it belongs to others."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 4096:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def _network() -> str:
    """The namespace of the network: in another one, 127.0.0.1 is another host."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface."""
    fcntl = importlib.import_module("fcntl")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, packed)[20:24])


def _names() -> list[str]:
    """The names and addresses by which other hosts may reach this one, the likeliest first."""
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
