"""The connections between the relays: rank 0 listens, the others connect to it, and it passes on what each one says.

Nothing is sent while all is well. A connection ends with its process, so a rank that is killed is noticed at once; the
system's keepalive packets notice a host that is gone. Rank 0 leaves its address, and a secret, in the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, final

import attrs

from flatparam_comm.relay.host import host_identity, host_names, network_of_host
from flatparam_comm.relay.settings import RelaySettings

__all__ = ["CLOSED", "Ended", "Said", "Star"]

#: The reason of an end that the other process, or its system, has told of.
CLOSED: Final = "the connection was closed"
_KEY: Final = "address"
#: Keepalive packets without an answer until a host is gone.
_UNANSWERED: Final = 3
#: The bytes of the line by which a rank introduces itself, at most.
_LONGEST_HELLO: Final = 4096


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
        return self.take(data), reason

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that end with `data`."""
        self.buffer += data
        *lines, rest = bytes(self.buffer).split(b"\n")
        self.buffer[:] = rest
        return [json.loads(line) for line in lines]


@final
@attrs.define(eq=False)
class _Guest:
    """A connection that has not said yet which rank it is; anybody who reaches this host can make one."""

    socket: socket.socket
    until: float
    """The moment at which it is sent away."""
    said: bytearray = attrs.field(factory=bytearray)

    def hear(self) -> bool:
        """Take what has arrived; returns whether that is all that it has to say, a whole line or too much."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.socket.recv(_LONGEST_HELLO)
        self.said += data
        return not data or b"\n" in self.said or len(self.said) > _LONGEST_HELLO

    def rank(self, secret: str) -> int | None:
        """The rank that it says it is; None if it does not know the secret."""
        try:
            told = json.loads(self.said.partition(b"\n")[0])
        # Brackets can be nested deeper than the parser goes.
        except (ValueError, RecursionError):
            return None
        if not isinstance(told, dict):
            return None
        rank, guess = told.get("rank"), str(told.get("secret")).encode(errors="replace")
        return rank if type(rank) is int and secrets.compare_digest(guess, secret.encode()) else None


@final
class Star:
    """The connection of this rank to all others, for one thread (but `wake`, which any thread may call)."""

    def __init__(self, rank: int, store: Any, settings: RelaySettings) -> None:
        """Prepare; `store` is a connection of its own to the store of the group."""
        self._rank = rank
        self._store = store
        self._settings = settings
        self._lines: dict[int, _Line] = {}
        self._guests: dict[int, _Guest] = {}
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
            told = {"host": host_identity(), "space": network_of_host(), "names": host_names(), "port": port}
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
        for fd in (*by_fd, *self._guests):
            poll.register(fd, select.POLLIN)
        timeout = min([timeout, *(guest.until - time.monotonic() for guest in self._guests.values())])
        for fd, _ in poll.poll(max(0.0, timeout * 1e3)):
            if fd == self._ears:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._ears, 4096)
            elif fd in by_fd:
                yield from self._hear(by_fd[fd])
            elif fd in self._guests:
                yield from self._welcome(fd)
            else:
                self._accept()
        for fd, guest in [*self._guests.items()]:
            if time.monotonic() >= guest.until:
                self._guests.pop(fd).socket.close()

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
        for guest in self._guests.values():
            guest.socket.close()
        self._lines, self._guests = {}, {}
        if self._listener is not None:
            self._listener.close()
        self._listener = self._store = None
        if self._ears >= 0:
            os.close(self._ears)
            os.close(self._bell)
        self._ears = self._bell = -1

    def _hear(self, line: _Line) -> Iterator[Said | Ended]:
        messages, reason = line.receive()
        yield from self._said(messages)
        if reason is not None:
            line.socket.close()
            del self._lines[line.rank]
            yield Ended(line.rank, reason)

    def _said(self, messages: Iterable[dict[str, Any]]) -> Iterator[Said]:
        for message in messages:
            rank = int(message["rank"])
            if self._rank == 0:
                self._pass_on(rank, message["words"])
            yield Said(rank, message["words"])

    def _pass_on(self, rank: int, words: dict[str, Any]) -> None:
        encoded = self._last[rank] = _encode(rank, words)
        for other, line in self._lines.items():
            if other != rank:
                line.send(encoded)

    def _accept(self) -> None:
        assert self._listener is not None, "only rank 0 is connected to"
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._guests[connection.fileno()] = _Guest(connection, time.monotonic() + self._settings.sending)

    def _welcome(self, fd: int) -> Iterator[Said]:
        """Hear a guest, who is one of the ranks once it has said so."""
        guest = self._guests[fd]
        if not guest.hear():
            return
        del self._guests[fd]
        rank = guest.rank(self._secret)
        if rank is None:
            guest.socket.close()
            return
        with contextlib.suppress(OSError):
            _prepare(guest.socket, self._settings)
        line = self._lines[rank] = _Line(guest.socket, rank)
        for other, message in self._last.items():
            if other != rank:
                line.send(message)
        yield from self._said(line.take(bytes(guest.said).partition(b"\n")[2]))

    def _try_to_connect(self) -> None:
        now = time.monotonic()
        if now < self._next_try:
            return
        self._next_try = now + self._retry
        self._retry = min(2 * self._retry, self._settings.longest_retry)
        if not self._store.check([_KEY]):
            return
        told = json.loads(self._store.get(_KEY))
        is_here = tuple(told["host"]) == host_identity() and told["space"] == network_of_host()
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
