"""The seam to a guard, which makes failures travel: flatparam-guard, found by an entry point of `flatparam.guard`.

A rank that waits for one that has failed learns of it from the guard, within seconds; so do ranks whose collectives
differ. Without a guard the collectives work: an error says what the backend says, and a rank that waits in vain waits
for the time limit of its process group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, final

from flatparam_comm.addons import module_behind, say_once
from flatparam_comm.checks import Site
from flatparam_comm.collectives import Collectives, ExchangesValues
from flatparam_comm.errors import CollectiveError, CommError
from flatparam_comm.process_group import c10d

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Wait = tuple[Any, int, str, str]
"""A wait for other ranks: the monitor of its group, the collective's number there, its operation and its label."""

_UNGUARDED: Final = (
    "flatparam-guard is not installed: if a rank fails, those that wait for it learn nothing before the time limit of "
    "their process group; pip install flatparam-guard"
)


class GroupMonitor(Protocol):
    """An observer of the collectives of this process on one process group.

    An engine calls the first three methods; a transport of its own beside the group's backend calls the others, too.
    """

    issued: int
    """The collectives that this process has issued on the group."""

    def begin(self, site: Site, dtype: torch.dtype | None = None, numel: int = 0, detail: int = 0) -> None:
        """Count a collective that is issued now, and compare it with those of other ranks.

        Args:
            dtype: the dtype of its tensors.
            numel: the number of elements of the longest of them.
            detail: the reduction, or the root.

        Raises:
            PeerError: if a rank of the group has failed, so that the group is broken.
            MismatchError: if a rank has issued a different collective.
        """

    def wait_for(self, site: Site, number: int, wait: Callable[[], T]) -> T:
        """Return the result of `wait`, which returns when collective `number` is complete.

        Raises:
            CommError: in the place of an exception of the backend; it names the rank, the collective, and who failed
                first.
        """

    def error_of(self, site: Site, error: Exception, *, waited: bool) -> CommError:
        """Return the error to raise for one of the backend.

        Args:
            waited: the backend was waiting for the peers, so that the error may be their doing.
        """

    def note(self, site: Site, dtype: torch.dtype | None, numel: int, detail: int) -> object:
        """Count a collective as `begin`, and leave it to the transport to compare it."""

    def enter_wait(self, site: Site, number: int) -> Wait | None:
        """From now on this thread waits until each rank has issued collective `number`.

        Returns:
            What it has waited in before, for `end_wait`.
        """

    def end_wait(self, before: Wait | None) -> None:
        """This thread waits no longer, or in what it has waited in before."""

    def check(self, site: Site, *, patiently: bool = False) -> None:
        """Raise what a peer's failure has made of the collectives of this group, if anything.

        Args:
            patiently: wait some seconds for a peer to say so.
        """

    def tell(self, error: CommError) -> None:
        """Let the other ranks know of an error of this one, or that ranks diverge, and break the group here."""


class SurvivingRanks(ExchangesValues, Protocol):
    """The ranks whose processes live after a failure: they exchange small values without the group's connections."""

    @property
    def steps(self) -> int:
        """The optimizer steps that this process has done."""

    @property
    def is_in_step(self) -> bool:
        """Whether this process's last optimizer step has not ended."""

    def leave(self) -> None:
        """Return when the others have read what they need, or after a moment."""


class Guard(Protocol):
    """A module that an entry point `flatparam.guard` names, imported when the first process group is made."""

    def begin(self) -> None:
        """Begin with torch's default group, which has just been made, or end with it."""

    def monitor_of(
        self, group: ProcessGroup, transport: str, exchange: Callable[[Any], list[Any]] | None
    ) -> GroupMonitor:
        """Return the monitor of a group. For the arguments see the function of this name in this module."""

    def tell_failure(self, error: BaseException | None, where: str = "", *, is_final: bool = False) -> None:
        """Let the ranks that wait for this one know that it has failed."""

    def watch_call(self, frame: FrameType, where: str) -> None:
        """Tell the others if the call with this frame raises."""

    def end_of_call(self) -> None:
        """The call that is watched is about to return."""

    def survivors_of(self, ranks: Collectives, error: BaseException | None, seconds: float) -> SurvivingRanks:
        """Meet the ranks that live after a failure."""


@functools.cache
def guard() -> Guard | None:
    """Return the guard of this process, imported on the first call; None if none is installed."""
    found: Guard | None = module_behind("flatparam.guard", "guard", "flatparam_guard")
    return found


def monitor_of(
    group: ProcessGroup, transport: str = "", exchange: Callable[[Any], list[Any]] | None = None
) -> GroupMonitor:
    """Return what follows the collectives of a process group, which is used for the first time.

    Args:
        transport: what moves the bytes, if the group's backend does not. Each one counts by itself.
        exchange: a function that returns every rank's argument, if the ranks may exchange values now.
    """
    found = guard()
    if found is not None:
        return found.monitor_of(group, transport, exchange)
    say_once(_UNGUARDED)
    return _Unguarded()


@final
class _Unguarded:
    """The monitor of a group if there is no guard: it counts, and says what the backend says."""

    __slots__ = ("issued",)

    def __init__(self) -> None:
        self.issued = 0

    def begin(self, site: Site, dtype: torch.dtype | None = None, numel: int = 0, detail: int = 0) -> None:
        self.issued += 1

    def note(self, site: Site, dtype: torch.dtype | None, numel: int, detail: int) -> object:
        self.issued += 1
        return None

    def wait_for(self, site: Site, number: int, wait: Callable[[], T]) -> T:
        try:
            return wait()
        except CollectiveError:
            raise
        except Exception as error:
            raise self.error_of(site, error, waited=True) from error

    def error_of(self, site: Site, error: Exception, *, waited: bool) -> CommError:
        return backend_error(site, error)

    def enter_wait(self, site: Site, number: int) -> Wait | None:
        return None

    def end_wait(self, before: Wait | None) -> None:
        return

    def check(self, site: Site, *, patiently: bool = False) -> None:
        return

    def tell(self, error: CommError) -> None:
        return


def backend_error(site: Site, error: Exception, advice: str = "") -> CollectiveError:
    """Return the error that says of one of the backend where it happened."""
    usual = "look for the first error among the other ranks, or for a rank that did not make this call"
    text = f"the process group failed with {type(error).__name__}: {error}; {advice or usual}"
    return CollectiveError(site.rank, site.op, site.label, text)


def tell_failure(error: BaseException | None, where: str = "", *, is_final: bool = False) -> None:
    """Let the ranks that wait for this one raise `PeerError`, since this one has failed.

    It does nothing if there is no guard, or if the same exception was told before, and never raises. If this rank goes
    on and issues its next collective, the other ranks go on waiting for it.

    Args:
        error: the exception, or None if nobody knows it.
        where: what this rank was doing, as in `forward pass of unit 'blocks.1'`.
        is_final: this process is about to end, so the call returns when the failure is told (or after a moment).
    """
    found = guard()
    if found is not None:
        found.tell_failure(error, where, is_final=is_final)


@contextlib.contextmanager
def telling(where: str) -> Iterator[None]:
    """Tell an exception that passes through to the other ranks, and let it go on.

    Use it around code of your own in which ranks wait for each other, if the process outlives its exceptions: in a
    notebook, or below an `except`. An exception that ends the process is told without it.

    Args:
        where: what this rank is doing, as in `evaluation`.
    """
    try:
        yield
    except BaseException as error:
        tell_failure(error, where)
        raise


def watch_call(frame: FrameType, where: str) -> None:
    """Let the ranks that wait for this one raise `PeerError` within seconds if the call with this frame raises.

    For calls of other people's functions between two hooks of theirs, of which the second is not called after an
    exception: `end_of_call` says that the call ends otherwise. It does nothing if there is no guard.

    Args:
        frame: the frame of the call, in this thread, as `sys._getframe(1)` in the first hook.
        where: what this rank is doing, as in `step of AdamW`.
    """
    found = guard()
    if found is not None:
        found.watch_call(frame, where)


def end_of_call() -> None:
    """The call that is watched, if there is one, is about to return: one more step of an optimizer is done."""
    found = guard()
    if found is not None:
        found.end_of_call()


def survivors_of(ranks: Collectives, error: BaseException | None, seconds: float) -> SurvivingRanks:
    """Meet the ranks that live after a failure; every rank calls it where it has caught its exception.

    Args:
        ranks: collectives over a process group, through whatever decorators; also those through shared memory.
        error: this rank's exception. The ranks that wait for this one in a collective stop waiting.
        seconds: how long each exchange waits for the slowest rank.

    Raises:
        CollectiveError: if there is no guard, if the ranks are no processes, or if their group has no store.
    """
    found = guard()
    if found is None:
        text = (
            "expected a guard, by which ranks find each other after a failure, found none: pip install flatparam-guard"
        )
        raise CollectiveError(ranks.rank, "survivors", "", text)
    return found.survivors_of(ranks, error, seconds)


def _begin() -> None:
    # Whatever is missing, torch's default group is made.
    with contextlib.suppress(Exception):
        found = guard()
        if found is not None:
            found.begin()


c10d.call_with_default_group(_begin)
