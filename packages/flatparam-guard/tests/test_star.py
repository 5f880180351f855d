"""The connections between relays: here the ranks are objects of one process, and listen in turn."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from each_row import each_row

from flatparam_comm.testing import PATIENCE
from flatparam_guard.relay_settings import RelaySettings
from flatparam_guard.star import GARBLED, Ended, Said, Star

SIZE = 4
HELLO, BYE = {"text": "hello"}, {"text": "bye"}


@pytest.fixture
def stars() -> Iterator[Callable[[int], Star]]:
    """A function that makes the star of a rank; all of a test share a store."""
    with contextlib.ExitStack() as stack:
        store = dist.HashStore()

        def make(rank: int) -> Star:
            star = Star(rank, SIZE, store, RelaySettings())
            stack.callback(star.drop)
            star.open()
            return star

        yield make


def heard(star: Star, others: list[Star], count: int) -> list[Said | Ended]:
    """The first `count` news of `star`, while the others listen too: rank 0 has to accept and to pass on."""
    news: list[Said | Ended] = []
    while len(news) < count:
        for other in others:
            for _ in other.listen(0.0):
                pass
        news.extend(star.listen(0.02))
    return news


def test_rank_0_passes_on_what_each_rank_says(stars: Callable[[int], Star]) -> None:
    """What a rank says reaches all others, also those that connect later, which hear the last words of each rank."""
    first, second = stars(0), stars(1)
    second.say(HELLO)
    assert heard(first, [second], 1) == [Said(1, HELLO)]
    assert first.is_connected
    assert second.is_connected
    first.say(BYE)
    assert heard(second, [first], 1) == [Said(0, BYE)]
    third = stars(2)
    late = heard(third, [first, second], 2)
    assert sorted(late, key=lambda each: each.rank) == [Said(0, BYE), Said(1, HELLO)]
    third.say(HELLO)
    assert heard(second, [first, third], 1) == [Said(2, HELLO)]
    first.say_for(1, BYE)
    assert heard(third, [first], 1) == [Said(1, BYE)]


@pytest.mark.parametrize("politely", [True, False])
def test_the_end_of_a_connection_is_heard(stars: Callable[[int], Star], politely: bool) -> None:
    """Rank 0 hears that a rank has gone, after its last words, however it went."""
    first, second = stars(0), stars(1)
    second.say(HELLO)
    heard(first, [second], 1)
    second.say(BYE)
    if politely:
        second.close()
    else:
        second.drop()
    said, ended = heard(first, [], 2)
    assert said == Said(1, BYE)
    assert isinstance(ended, Ended)
    assert (ended.rank, ended.reason) == (1, "the connection was closed")
    assert not first.is_connected
    # Nobody hears it, and nothing is raised.
    first.say(HELLO)


def test_a_stranger_is_not_heard(stars: Callable[[int], Star]) -> None:
    """A connection that does not know the secret, or does not begin with a line of JSON, is dropped."""
    store = dist.HashStore()
    first = Star(0, SIZE, store, RelaySettings())
    try:
        first.open()
        told = json.loads(store.get("address"))
        hellos = (
            b'{"secret": "guessed", "rank": 1}\n',
            b'{"secret": "\xc3\xa9", "rank": 1}\n',
            b'{"secret": "\\ud800", "rank": 1}\n',
            json.dumps({"secret": told["secret"], "rank": "1"}).encode() + b"\n",
            b"no JSON\n",
            b"\xff\n",
            b"1\n",
            b"[]\n",
            b"[" * 4000 + b"\n",
            b'{"rank": 1}\n',
            b"",
            b"x" * 5000,
        )
        for hello in hellos:
            with socket.create_connection(("127.0.0.1", told["port"])) as stranger:
                if hello:
                    stranger.sendall(hello)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(PATIENCE)
                # It is sent away, so its own reading ends.
                while not _is_over(first, stranger):
                    pass
            assert not first.is_connected
    finally:
        first.close()
    assert not store.check(["address"])


def _is_over(star: Star, stranger: socket.socket) -> bool:
    assert list(star.listen(0.0)) == []
    stranger.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            return stranger.recv(1) == b""
        except ConnectionResetError:
            return True
    return False


def _introduced(store: dist.Store, rank: int) -> socket.socket:
    """A connection of somebody who knows what the store holds, and says that it is `rank`."""
    told = json.loads(store.get("address"))
    connection = socket.create_connection(("127.0.0.1", told["port"]))
    connection.sendall(json.dumps({"secret": told["secret"], "rank": rank}).encode() + b"\n")
    connection.settimeout(PATIENCE)
    return connection


@each_row("rank", [-1, 0, 1, SIZE, 10**30])
def test_nobody_is_a_rank_twice(rank: int) -> None:
    """Whoever knows the secret is no rank that is connected already, and none that the world does not have."""
    store = dist.HashStore()
    first, second = (Star(each, SIZE, store, RelaySettings()) for each in range(2))
    try:
        first.open()
        second.say(HELLO)
        heard(first, [second], 1)
        with _introduced(store, rank) as stranger:
            while not _is_over(first, stranger):
                pass
        second.say(BYE)
        assert heard(first, [second], 1) == [Said(1, BYE)]
    finally:
        first.close()
        second.close()


def test_a_rank_speaks_for_itself() -> None:
    """What a rank says in the name of another one counts as its own."""
    store = dist.HashStore()
    first = Star(0, SIZE, store, RelaySettings())
    try:
        first.open()
        with _introduced(store, 2) as second:
            second.sendall(json.dumps({"rank": 1, "words": HELLO}).encode() + b"\n")
            assert heard(first, [], 1) == [Said(2, HELLO)]
    finally:
        first.close()


@each_row("line", [b"no JSON", b"[]", b"1", b"\xff", b'{"rank": "1", "words": {}}', b'{"rank": 1}', b"[" * 100_000])
def test_words_that_are_none_end_their_own_connection(line: bytes) -> None:
    """A line that is no message closes the connection on which it came, and the others go on."""
    store = dist.HashStore()
    first, second = (Star(each, SIZE, store, RelaySettings()) for each in range(2))
    try:
        first.open()
        second.say(HELLO)
        heard(first, [second], 1)
        with _introduced(store, 2) as third:
            while 2 not in first._lines:
                list(first.listen(0.01))
            third.sendall(line + b"\n")
            assert heard(first, [second], 1) == [Ended(2, GARBLED)]
        second.say(BYE)
        assert heard(first, [second], 1) == [Said(1, BYE)]
    finally:
        first.close()
        second.close()


def test_strangers_do_not_take_all_descriptors() -> None:
    """Of more than 64 connections that say nothing, the oldest are sent away, and a rank is heard all the same."""
    store = dist.HashStore()
    first, second = (Star(each, SIZE, store, RelaySettings(sending=PATIENCE)) for each in range(2))
    with contextlib.ExitStack() as stack:
        stack.callback(first.close)
        stack.callback(second.close)
        first.open()
        port = json.loads(store.get("address"))["port"]
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            list(first.listen(0.0))
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            list(first.listen(0.0))
        assert len(first._guests) == 64
        if before:
            # The strangers' own ends are in this process, too.
            assert len(os.listdir("/proc/self/fd")) <= before + 100 + 64
        second.say(HELLO)
        assert heard(first, [second], 1) == [Said(1, HELLO)]


def test_a_rank_that_is_sent_away_tries_again() -> None:
    """A rank whose connection was closed before anybody spoke connects once more, and takes nobody for dead."""
    store = dist.HashStore()
    first, second = (Star(each, SIZE, store, RelaySettings()) for each in range(2))
    try:
        first.open()
        assert list(second.listen(0.0)) == []
        assert second.is_connected
        list(first.listen(1.0))
        for guest in first._guests.values():
            guest.socket.close()
        first._guests.clear()
        first.say(HELLO)
        assert heard(second, [first], 1) == [Said(0, HELLO)]
    finally:
        first.close()
        second.close()


def test_the_secret_is_deleted_when_all_are_connected() -> None:
    """What the store holds of the hub is there until the last rank is connected, and no longer."""
    store = dist.HashStore()
    first, second, third = (Star(each, 3, store, RelaySettings()) for each in range(3))
    try:
        first.open()
        for star in (second, third):
            assert store.check(["address"])
            star.say(HELLO)
            heard(first, [star], 1)
        assert not store.check(["address"])
        assert first.secret == second.secret == third.secret != ""
    finally:
        for star in (first, second, third):
            star.close()


def test_a_world_of_one_host_listens_on_loopback() -> None:
    """The hub listens for its own host alone, until a rank of another one asks for it."""
    store = dist.HashStore()
    first = Star(0, SIZE, store, RelaySettings())
    try:
        first.open()
        list(first.listen(0.0))
        assert [each.getsockname()[0] for each in first._listeners.values()] == ["127.0.0.1"]
        store.set("elsewhere", "1")
        while len(first._listeners) < 2:
            list(first.listen(0.01))
        told = json.loads(store.get("address for other hosts"))
        with socket.create_connection(("127.0.0.1", told["port"])) as other:
            other.sendall(json.dumps({"secret": told["secret"], "rank": 3}).encode() + b"\n")
            while not first.is_connected:
                list(first.listen(0.01))
    finally:
        first.close()


def test_another_rank_takes_the_part_of_rank_0() -> None:
    """If the program of rank 0 has no relay, the next rank that finds none is the hub; rank 0 may come later."""
    store = dist.HashStore()
    second, third, first = (Star(rank, SIZE, store, RelaySettings(hub=1e-6)) for rank in (1, 2, 0))
    try:
        for star in (second, third):
            star.open()
            list(star.listen(0.01))
        assert (second.is_hub, third.is_hub) == (True, False)
        third.say(HELLO)
        assert heard(second, [third], 1) == [Said(2, HELLO)]
        first.open()
        first.say(BYE)
        assert heard(third, [first, second], 1) == [Said(0, BYE)]
        assert first.hub == third.hub == 1
    finally:
        for star in (first, second, third):
            star.close()
    assert not store.check(["offers"])


def test_a_hub_that_is_gone_before_anybody_has_heard_it() -> None:
    """A rank of the host whose connections are refused takes the hub for dead after a while, and says so once."""
    store = dist.HashStore()
    first, second = (Star(each, SIZE, store, RelaySettings(connect=0.01)) for each in range(2))
    try:
        first.open()
        first.drop()
        assert heard(second, [], 1) == [Ended(0, "the connection was closed")]
        assert list(second.listen(0.0)) == []
    finally:
        second.close()


def test_what_is_left_of_an_earlier_run() -> None:
    """Rank 0 of the next run takes the place of a hub that was killed, whose keys are still there."""
    store = dist.HashStore()
    killed, first, second = (Star(each, SIZE, store, RelaySettings()) for each in (0, 0, 1))
    try:
        killed.open()
        killed.drop()
        first.open()
        second.say(HELLO)
        assert heard(first, [second], 1) == [Said(1, HELLO)]
    finally:
        first.close()
        second.close()


def test_a_slow_stranger_holds_nobody_up(stars: Callable[[int], Star]) -> None:
    """Ranks are heard at once beside a connection that has sent half a line, which is sent away after a while."""
    store = dist.HashStore()
    first = Star(0, SIZE, store, RelaySettings(sending=0.05))
    second = Star(1, SIZE, store, RelaySettings())
    try:
        first.open()
        port = json.loads(store.get("address"))["port"]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b'{"secret": ')
            second.say(HELLO)
            assert heard(first, [second], 1) == [Said(1, HELLO)]
            while not _is_over(first, stranger):
                pass
        second.say(BYE)
        assert heard(first, [second], 1) == [Said(1, BYE)]
    finally:
        first.close()
        second.close()


def test_words_right_behind_the_introduction(stars: Callable[[int], Star]) -> None:
    """What a rank says in the packet in which it introduces itself is heard, too, and half a line is kept."""
    store = dist.HashStore()
    first = Star(0, SIZE, store, RelaySettings())
    try:
        first.open()
        told = json.loads(store.get("address"))
        hello = json.dumps({"secret": told["secret"], "rank": 1}).encode()
        words = json.dumps({"rank": 1, "words": HELLO}).encode()
        with socket.create_connection(("127.0.0.1", told["port"])) as second:
            second.sendall(hello + b"\n" + words + b"\n" + words[:5])
            assert heard(first, [], 1) == [Said(1, HELLO)]
            second.sendall(words[5:] + b"\n")
            assert heard(first, [], 1) == [Said(1, HELLO)]
    finally:
        first.close()


def test_an_address_that_nobody_listens_at(stars: Callable[[int], Star]) -> None:
    """A rank whose address of rank 0 leads nowhere goes on, hears nothing, and can be closed."""
    store = dist.HashStore()
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    told = {"host": ["elsewhere"], "space": "", "names": ["127.0.0.1"], "port": port, "secret": "", "rank": 0}
    store.set("address", json.dumps(told))
    store.set("address for other hosts", json.dumps(told))
    second = Star(1, SIZE, store, RelaySettings())
    assert list(second.listen(0.0)) == []
    assert not second.is_connected
    second.say(HELLO)
    second.close()
    second.wake()


def test_waking_ends_the_wait(stars: Callable[[int], Star]) -> None:
    """`wake` has `listen` return without news, however often it was called."""
    first = stars(0)
    for _ in range(3):
        first.wake()
    assert list(first.listen(600.0)) == []


def test_the_interface_that_a_user_names_comes_first(
    monkeypatch: pytest.MonkeyPatch, stars: Callable[[int], Star]
) -> None:
    """Other hosts try the addresses of GLOO_SOCKET_IFNAME's interfaces, then MASTER_ADDR, then the name of the host."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,no-such-interface")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "main.example")
    store = dist.HashStore()
    first = Star(0, SIZE, store, RelaySettings())
    first.open()
    store.set("elsewhere", "1")
    assert list(first.listen(0.0)) == []
    names = json.loads(store.get("address for other hosts"))["names"]
    first.close()
    assert names.index("main.example") < names.index(socket.gethostname())
    assert names[0] == ("127.0.0.1" if os.path.exists("/sys/class/net/lo") else "main.example")
