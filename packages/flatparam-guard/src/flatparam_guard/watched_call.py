"""A call of somebody else's function, which says that it has begun and ended, but not that it has raised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import final

import attrs

__all__ = ["WatchedCall"]


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
    """The frames from the innermost to the outermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back
