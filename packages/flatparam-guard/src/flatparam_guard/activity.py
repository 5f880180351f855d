"""The actions of this process, as far as its relay asks: collectives that it issues, and steps of its optimizers.

They are written down here, without a lock or a message; the relay's thread looks at them now and then.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any, Final, final

import attrs

from flatparam_guard.watched_call import WatchedCall

__all__ = ["ACTIVITY", "end_of_call", "watch_call"]


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
