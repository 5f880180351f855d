"""The connections between the relays: the others connect to one rank, the hub, which passes on what each one says.

The hub is rank 0 if its program has a relay, or else the first other rank that finds none. Nothing is sent while no
rank waits for half a second. A connection ends with its process, so a rank that is killed is noticed at once; the
system's keepalive packets notice a host that is gone. The hub leaves its address, and a secret, in the store until all
ranks are connected: whoever reaches the store can read it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import socket
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Final, final

import attrs

from flatparam_comm.hosts import host_identity
from flatparam_guard.relay_settings import RelaySettings, host_names, network_of_host

#: The reason of an end that the other process, or its system, has told of.
CLOSED: Final = "the connection was closed"
#: The reason of an end that says nothing about the process: its words were none.
GARBLED: Final = "what it said cannot be read"
#: The keys of the store: where the hub listens for the ranks of its host, and for all; that a rank is on another host;
#: and how many ranks have offered to be the hub, of which the first is it.
_KEY, _WIDE, _ELSEWHERE, _OFFERS = "address", "address for other hosts", "elsewhere", "offers"
#: Keepalive packets without an answer until a host is gone.
_UNANSWERED: Final = 3
#: The bytes of the line by which a rank introduces itself, at most.
_LONGEST_HELLO: Final = 4096
#: The bytes of any other line, at most.
_LONGEST_LINE: Final = 1 << 22
#: Connections that have not said yet which rank they are, at most: the program needs its descriptors.
_GUESTS: Final = 64


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
    is_heard: bool = False
    """Whether it has said anything; the hub begins with its own words."""
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
        """Return the messages that have arrived, and why no more will come, if so."""
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
        try:
            return self.take(data), reason
        except ValueError:
            return [], GARBLED

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that end with `data`; raises ValueError if they are none."""
        self.buffer += data
        *lines, rest = bytes(self.buffer).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise ValueError("the line does not end")
        self.buffer[:] = rest
        self.is_heard = self.is_heard or bool(lines)
        return [_decode(line) for line in lines]


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
        """Return the rank that it says it is; None if it does not know the secret."""
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

    def __init__(self, rank: int, size: int, store: Any, settings: RelaySettings) -> None:
        """Prepare rank `rank` of `size`; `store` is a connection of its own to the store of the group."""
        self._rank = rank
        self._size = size
        self._store = store
        self._settings = settings
        self.hub = -1
        """The rank that passes on what each one says; -1 if it is not known yet."""
        self._lines: dict[int, _Line] = {}
        self._guests: dict[int, _Guest] = {}
        self._listeners: dict[int, socket.socket] = {}
        self.secret = ""
        """A text that only the ranks know, once this one has heard of the hub."""
        self._last: dict[int, bytes] = {}
        self._mine: list[bytes] = []
        self._next_try = 0.0
        self._retry = settings.retry
        self._offers_at = 0.0
        self._refused_since = math.inf
        self._ears, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ears, False)

    @property
    def is_connected(self) -> bool:
        """Whether this rank hears any other one."""
        return bool(self._lines)

    @property
    def is_hub(self) -> bool:
        """Whether this rank passes on what each one says."""
        return self.hub == self._rank

    def open(self) -> None:
        """Begin: rank 0 offers to be the hub."""
        self._offers_at = time.monotonic() + (0.0 if self._rank == 0 else self._settings.hub)
        if self._rank == 0:
            self._offer()

    def _offer(self) -> None:
        """Become the hub, unless another rank has offered before: listen, and say where."""
        if self._store.add(_OFFERS, 1) != 1:
            self._offers_at = math.inf
            return
        self._become_hub()

    def _become_hub(self) -> None:
        self.secret = secrets.token_hex(16)
        self._listen(_KEY, socket.create_server(("127.0.0.1", 0), backlog=128), [])
        # Last: this rank's program goes on now, and may end.
        self.hub = self._rank

    def _listen(self, key: str, listener: socket.socket, names: list[str]) -> None:
        self._listeners[listener.fileno()] = listener
        told = {"host": host_identity(), "space": network_of_host(), "names": names, "rank": self._rank}
        told |= {"port": listener.getsockname()[1], "secret": self.secret}
        self._store.set(key, json.dumps(told))

    def say(self, words: dict[str, Any]) -> None:
        """Send words to every other rank; those that connect later get the last ones of each rank."""
        message = _encode(self._rank, words)
        self._mine.append(message)
        self._last[self._rank] = message
        self._send_mine()

    def say_for(self, rank: int, words: dict[str, Any], *, to_itself: bool = False) -> None:
        """On the hub: send words to every other rank in place of `rank`, and also to `rank` if `to_itself`."""
        self._pass_on(rank, words)
        if to_itself:
            self.tell(rank, rank, words)

    def tell(self, rank: int, about: int, words: dict[str, Any]) -> None:
        """Send words about a rank to `rank` alone, if there is a connection to it."""
        if rank in self._lines:
            self._lines[rank].send(_encode(about, words))

    def listen(self, timeout: float) -> Iterator[Said | Ended]:
        """Wait for what the others say, for a call of `wake` or for `timeout` seconds."""
        if self._store is not None and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + self._retry
            self._retry = min(2 * self._retry, self._settings.longest_retry)
            yield from self._look_at_store()
        if self._store is not None:
            timeout = min(timeout, self._next_try - time.monotonic())
        poll = select.poll()
        poll.register(self._ears, select.POLLIN)
        by_fd = {line.socket.fileno(): line for line in self._lines.values()}
        for fd in (*self._listeners, *by_fd, *self._guests):
            poll.register(fd, select.POLLIN)
        timeout = min([timeout, *(guest.until - time.monotonic() for guest in self._guests.values())])
        ready = [fd for fd, _ in poll.poll(max(0.0, timeout * 1e3))]
        for fd in ready:
            if fd == self._ears:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._ears, 4096)
            elif fd in by_fd:
                yield from self._hear(by_fd[fd])
            elif fd in self._guests:
                yield from self._welcome(fd)
        # Last: whoever has said which rank it is must not be sent away for somebody new.
        for fd in ready:
            if fd in self._listeners:
                self._accept(self._listeners[fd])
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
        if self._store is not None:  # the file of a `FileStore` that is gone would be waited for
            self._store.set_timeout(timedelta(seconds=0.5))
        self._clear_store(_KEY, _WIDE, _ELSEWHERE, _OFFERS)
        self.drop()

    def _clear_store(self, *keys: str) -> None:
        """On the hub, delete keys of the store."""
        with contextlib.suppress(RuntimeError):  # whoever holds the store may be gone
            for key in keys if self.is_hub and self._store is not None else ():
                self._store.delete_key(key)

    def drop(self) -> None:
        """Close every descriptor at once, as a forked process has to: the connections are its parent's."""
        for line in self._lines.values():
            line.socket.close()
        for guest in self._guests.values():
            guest.socket.close()
        for listener in self._listeners.values():
            listener.close()
        self._lines, self._guests, self._listeners = {}, {}, {}
        self._store = None
        if self._ears >= 0:
            os.close(self._ears)
            os.close(self._bell)
        self._ears = self._bell = -1

    def _hear(self, line: _Line) -> Iterator[Said | Ended]:
        messages, reason = line.receive()
        if line.is_heard and not self.is_hub:
            # It is not needed any more, and may hold somebody up who ends it.
            self._store = None
        yield from self._said(line, messages)
        if reason is None:
            return
        line.socket.close()
        del self._lines[line.rank]
        if self.is_hub or line.is_heard:
            yield Ended(line.rank, reason)
        # Otherwise the hub had too many guests, and has sent this one away unheard.

    def _said(self, line: _Line, messages: Iterable[dict[str, Any]]) -> Iterator[Said]:
        for message in messages:
            rank = message["rank"]
            if self.is_hub:
                # Nobody speaks for others but the hub.
                rank = line.rank
                if "stand" not in message["words"]:
                    self._pass_on(rank, message["words"])
            yield Said(rank, message["words"])

    def _pass_on(self, rank: int, words: dict[str, Any]) -> None:
        encoded = self._last[rank] = _encode(rank, words)
        for other, line in self._lines.items():
            if other != rank:
                line.send(encoded)

    def _accept(self, listener: socket.socket) -> None:
        if len(self._guests) >= _GUESTS:
            self._guests.pop(next(iter(self._guests))).socket.close()
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            self._guests[connection.fileno()] = _Guest(connection, time.monotonic() + self._settings.sending)

    def _welcome(self, fd: int) -> Iterator[Said | Ended]:
        """Hear a guest, who is one of the ranks once it has said so."""
        guest = self._guests[fd]
        if not guest.hear():
            return
        del self._guests[fd]
        rank = guest.rank(self.secret)
        if rank is None or not 0 <= rank < self._size or rank == self._rank or rank in self._lines:
            guest.socket.close()
            return
        with contextlib.suppress(OSError):
            _prepare(guest.socket, self._settings)
        line = self._lines[rank] = _Line(guest.socket, rank)
        for other, message in self._last.items():
            if other != rank:
                line.send(message)
        if len(self._lines) == self._size - 1:
            # Nobody else will ask for it.
            self._clear_store(_KEY, _WIDE)
            self._next_try = math.inf
        try:
            yield from self._said(line, line.take(bytes(guest.said).partition(b"\n")[2]))
        except ValueError:
            line.socket.close()
            del self._lines[rank]
            yield Ended(rank, GARBLED)

    def _look_at_store(self) -> Iterator[Ended]:
        """Look for the hub, whose process may have ended; on the hub, for ranks of other hosts."""
        if self.is_hub:
            try:
                if self._store.check([_ELSEWHERE]):
                    self._next_try = math.inf
                    self._listen(_WIDE, _listen_everywhere(), host_names())
            except RuntimeError:
                # Whoever holds the store is gone.
                self._next_try = math.inf
            return
        if self._lines:
            return
        if self._store.check([_KEY]):
            told = json.loads(self._store.get(_KEY))
            self._connect(told)
            if time.monotonic() >= self._refused_since + self._settings.connect:
                # It has deleted this key if it could.
                self._next_try = math.inf
                yield Ended(told["rank"], CLOSED)
        elif time.monotonic() >= self._offers_at:
            self._offer()

    def _connect(self, told: dict[str, Any]) -> None:
        """Connect to the hub, by what it has said in the store."""
        names, is_here = ["127.0.0.1"], True
        if tuple(told["host"]) != host_identity() or told["space"] != network_of_host():
            if not self._store.check([_WIDE]):
                self._store.set(_ELSEWHERE, "1")
                return
            told = json.loads(self._store.get(_WIDE))
            names, is_here = told["names"], False
        for name in names:
            try:
                connection = socket.create_connection((name, told["port"]), timeout=self._settings.sending)
                _prepare(connection, self._settings)
                hello = json.dumps({"secret": told["secret"], "rank": self._rank}).encode() + b"\n"
                connection.sendall(hello)
                self.hub, self.secret = told["rank"], told["secret"]
                self._lines[self.hub] = _Line(connection, self.hub)
                self._refused_since = math.inf
                self._send_mine()
                return
            except ConnectionRefusedError:
                if is_here:
                    self._refused_since = min(self._refused_since, time.monotonic())
            except OSError:
                continue
        if self._rank == 0 and self._refused_since < math.inf:
            # What is left of a run that was before this one.
            self._become_hub()

    def _send_mine(self) -> None:
        if self._lines:
            for message in self._mine:
                for line in self._lines.values():
                    line.send(message)
            self._mine = []
        elif self.is_hub:
            self._mine = []


def _decode(line: bytes) -> dict[str, Any]:
    """Return the message in a line; raises ValueError if there is none."""
    try:
        told = json.loads(line)
    # Brackets can be nested deeper than the parser goes.
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not (isinstance(told, dict) and type(told.get("rank")) is int and isinstance(told.get("words"), dict)):
        raise ValueError("expected a rank and its words")
    return told


def _encode(rank: int, words: dict[str, Any]) -> bytes:
    return json.dumps({"rank": rank, "words": words}).encode() + b"\n"


def _listen_everywhere() -> socket.socket:
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
