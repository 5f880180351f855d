"""The actions of this process, as far as its relay asks: collectives that it issues, and steps of its optimizers.

They are written down here, without a lock or a message; the relay's thread looks at them now and then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Final, final

import attrs


@final
@attrs.define
class Activity:
    """The actions of this process, as far as its relay asks."""

    issued: int = 0
    """The collectives that it has issued, on all groups."""
    watched: WatchedCall | None = None
    """The call that is watched: one at a time, the last to begin."""
    steps: int = 0
    """The watched calls that have ended: the steps of optimizers that have sharded parameters."""
    handled: int = 0
    """The number (`id`) of the exception, or None, that was handled when the last collective was issued."""
    waits: dict[int, tuple[Any, int, str, str] | None] = attrs.field(factory=dict)
    """For each thread that has waited for other ranks, the collective that it waits in now, if any: the calls of its
    group, its number there, and its operation and label."""
    is_in_step: bool = False
    """Whether the last watched call has not ended: it is under way, or has raised."""


ACTIVITY: Final = Activity()
"""The activity of this process."""


def watch_call(frame: FrameType, where: str) -> None:
    """Let the ranks that wait for this one raise `PeerError` within seconds if the call with this frame raises.

    For calls of other people's functions between two hooks of theirs, of which the second is not called after an
    exception: `end_of_call` says that the call ends otherwise. It does nothing if there is no relay.

    Args:
        frame: the frame of the call, in this thread, as `sys._getframe(1)` in the first hook.
        where: what this rank is doing, as in `step of AdamW`.
    """
    thread = threading.get_ident()
    ACTIVITY.watched = WatchedCall(where, ACTIVITY.issued, thread, id(frame), frame.f_code)
    ACTIVITY.is_in_step = True


def end_of_call() -> None:
    """The call that is watched, if there is one, is about to return: one more step of an optimizer is done."""
    if ACTIVITY.is_in_step:
        ACTIVITY.is_in_step = False
        ACTIVITY.steps += 1
    ACTIVITY.watched = None


# A call of somebody else's function, which says that it has begun and ended, but not that it has raised


@final
@attrs.frozen
class WatchedCall:
    """A call that is under way in a thread; if it is neither ended nor on the thread's stack, it has raised.

    The frame is known by its number: a reference would keep everything in it alive.
    """

    where: str
    """The action of the rank in it."""
    issued: int
    """The collectives that this process had issued when the call began."""
    _thread: int
    _frame: int
    _code: CodeType

    @property
    def is_under_way(self) -> bool:
        """Whether the call is on the stack of its thread."""
        return any(self._is(frame) for frame in _stack(sys._current_frames().get(self._thread)))

    @property
    def error(self) -> BaseException | None:
        """The exception that has come out of the call, if the thread is handling it now."""
        # From Python 3.11 on the exception itself is there; before, a triple with it in the middle.
        found = sys._current_exceptions().get(self._thread)
        error = found[1] if isinstance(found, tuple) else found
        if not isinstance(error, BaseException):
            return None
        trace = error.__traceback__
        while trace is not None and not self._is(trace.tb_frame):
            trace = trace.tb_next
        return None if trace is None else error

    def _is(self, frame: FrameType) -> bool:
        return id(frame) == self._frame and frame.f_code is self._code


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames from the innermost to the outermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back
