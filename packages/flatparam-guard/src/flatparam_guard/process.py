"""The relay of this process: when it begins and ends, and which failures it tells."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, final

import attrs

from flatparam_comm.process_group import groups
from flatparam_guard import torch_groups
from flatparam_guard.failure import FailureReport
from flatparam_guard.group_calls import GroupCalls
from flatparam_guard.relay import Relay
from flatparam_guard.relay_settings import RelaySettings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@final
@attrs.define
class _Setting:
    """Whether failures are relayed: as the program says, or else as the environment does."""

    chosen: bool | None = None

    @property
    def is_on(self) -> bool:
        """Whether a group that is used for the first time takes part."""
        if self.chosen is not None:
            return self.chosen
        return RelaySettings.read().is_on


@final
@attrs.define(eq=False)
class _OfThisProcess:
    """The relay of this process, and what it needs to know that is not for its thread."""

    relay: Relay | None = None
    world: weakref.ReferenceType[ProcessGroup] | None = None
    """The default process group that the relay belongs to."""
    calls: weakref.WeakKeyDictionary[ProcessGroup, dict[str, GroupCalls]] = attrs.field(
        factory=weakref.WeakKeyDictionary
    )
    served_store: Any = None
    """The store of that group: if its server lives in this process, it has to be there until the relay has ended."""
    finalizer: Any = None
    beginning: threading.Lock = attrs.field(factory=threading.Lock)
    abandoned: list[Any] = attrs.field(factory=list)
    """Objects that a forked process has inherited, and must not free: that would close the parent's connections."""
    hook: _Hook | None = None
    at_exit: Any = None


_SETTING: Final = _Setting()
_NOW: Final = _OfThisProcess()


def set_relay(on: bool) -> None:
    """Switch the relay of failures between processes on or off; without this, `FLATPARAM_RELAY=0` switches it off.

    If it is on, a rank that fails says so over a connection of the relay's own, and each rank that waits for it
    raises `PeerError` within seconds. All ranks have to choose alike. Process groups that were used while it was off
    stay without it.
    """
    _SETTING.chosen = bool(on)
    if not on:
        _end()


def monitor_of(
    group: ProcessGroup, transport: str = "", exchange: Callable[[Any], list[Any]] | None = None
) -> GroupCalls:
    """Return the calls of a process group, which is used for the first time; begin the relay if there is none yet.

    Args:
        transport: what moves the bytes, if the group's backend does not. Each one counts by itself.
        exchange: a function that returns every rank's argument, if the ranks may exchange values now.
    """
    found = _calls_of(group, transport)
    if exchange is not None:
        found.meet(exchange)
    return found


def _calls_of(group: ProcessGroup, transport: str = "") -> GroupCalls:
    with _NOW.beginning:
        by_transport = _NOW.calls.setdefault(group, {})
        found = by_transport.get(transport)
        if found is None:
            relay = None
            # Whatever is missing, the collectives work without a relay.
            with contextlib.suppress(Exception):
                relay = _relay_for(group)
            name = "" if relay is None else f"{groups.name_of(group)} {transport}".rstrip()
            is_gloo = not transport and torch_groups.is_between_processes(group) and groups.cpu_backend(group) == "gloo"
            board = None if relay is None else relay.board
            found = by_transport[transport] = GroupCalls(group, name, relay, board, goes_through_gloo=is_gloo)
            if relay is not None:
                relay.join(found)
    return found


def _relay_for(group: ProcessGroup) -> Relay | None:
    """Return the relay that a group takes part in, or None if it cannot, or shall not."""
    if not _SETTING.is_on:
        _end()
        return None
    if group.size() < 2 or not torch_groups.is_between_processes(group):
        return None
    world = groups.default_group()
    if world is None:
        return None
    settings = RelaySettings.read()
    if _NOW.relay is not None and _NOW.relay.is_running:
        if _NOW.world is not None and _NOW.world() is world:
            if not _NOW.relay.calls:
                # It began with the default group; the program may have set the environment since.
                _NOW.relay.set(settings)
            return _NOW.relay
        # Something, such as a traceback, keeps a default group alive that was destroyed.
        _end()
    store = groups.store_of(world, "flatparam relay", timedelta(seconds=settings.store))
    if store is None:
        return None
    relay = Relay(world.rank(), world.size(), store, settings)
    relay.start()
    _NOW.served_store = groups.served_store_of(world)
    _NOW.relay, _NOW.world = relay, weakref.ref(world)
    _NOW.finalizer = weakref.finalize(world, _end)
    _NOW.finalizer.atexit = False
    _watch_exits()
    return relay


def begin() -> None:
    """Begin the relay when torch has made its default group: a rank may fail before its first collective."""
    # Whatever is missing, the program works without a relay.
    with contextlib.suppress(Exception), _NOW.beginning:
        world = groups.default_group()
        if world is not None:
            _relay_for(world)


def _end() -> None:
    """End the relay, with its process group or on demand."""
    relay, finalizer = _NOW.relay, _NOW.finalizer
    _NOW.relay = _NOW.finalizer = None
    if finalizer is not None:
        finalizer.detach()
    if relay is not None:
        relay.end()
    _NOW.served_store = None
    _unhook()


def secret_of_ranks() -> str:
    """Return a text that the ranks of the world know, and nobody else who reaches the store; empty without a relay."""
    return "" if _NOW.relay is None else _NOW.relay.secret


def tell_failure(error: BaseException | None, where: str = "", *, is_final: bool = False) -> None:
    """Tell the other ranks of a failure; begins the relay if there is none yet."""
    if _NOW.relay is None:
        # Nothing was issued here yet, and the others may wait for the first collective.
        with contextlib.suppress(Exception):
            world = groups.default_group()
            if world is not None:
                _calls_of(world)
    relay = _NOW.relay
    if relay is None or not relay.is_running or relay.pid != os.getpid():
        return
    with contextlib.suppress(Exception):
        failure = FailureReport.of(relay.rank, error, where)
        relay.tell_error(error, attrs.evolve(failure, is_final=is_final))
        if is_final:
            relay.flush()


def end_of_process(rank: int) -> str:
    """The end of the process of `rank`, as its relay or the system has told it; empty if it lives, as far as known.

    Args:
        rank: numbered within the world.
    """
    relay = _NOW.relay
    return "" if relay is None else relay.end_of(rank)


# The ends of the process


def _watch_exits() -> None:
    """Tell of an exception that nobody catches, and of a program that ends while others may wait for it."""
    if _NOW.hook is None:
        _NOW.hook = _Hook(sys.excepthook)
        sys.excepthook = _NOW.hook
    # In a process that multiprocessing has started, only its own finalizers run; elsewhere it calls them at exit.
    _NOW.at_exit = multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)


def _unhook() -> None:
    # Somebody may have put a hook of their own over this one, as torch does with each default group: then it stays.
    hook = _NOW.hook
    if hook is not None and id(sys.excepthook) == id(hook):
        sys.excepthook = hook.before
        _NOW.hook = None
    if _NOW.at_exit is not None:
        _NOW.at_exit.cancel()
    _NOW.at_exit = None


@final
@attrs.frozen
class _Hook:
    """The hook for an exception that nobody catches, before the one that was there."""

    before: Any

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        tell_failure(error, is_final=True)
        self.before(kind, error, traceback)


def _at_exit() -> None:
    """The last words of a process, whether it was started by the user or by multiprocessing."""
    relay = _NOW.relay
    if relay is None or relay.pid != os.getpid():
        return
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        # torch.multiprocessing ends a process so when its function has raised.
        error = error.__context__ or (error if error.code else None)
    if error is not None:
        tell_failure(error, is_final=True)
    with contextlib.suppress(Exception):
        text = "it has ended its program (sys.exit(), or its last line) without destroy_process_group()"
        relay.tell_departure(text)
        relay.flush()
        relay.give_up()
    _NOW.relay = None
    relay.end()


def _after_fork() -> None:
    for by_transport in [*_NOW.calls.values()]:
        for calls in by_transport.values():
            calls.forbid()
    relay = _NOW.relay
    if relay is not None:
        _NOW.abandoned += [relay, _NOW.served_store]
        relay.forget()
    if _NOW.finalizer is not None:
        _NOW.finalizer.detach()
    _NOW.relay = _NOW.finalizer = None
    _NOW.beginning = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
