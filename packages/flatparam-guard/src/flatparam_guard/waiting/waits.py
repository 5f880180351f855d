"""The waits of this process for other ranks: the collectives that its threads are in, flatparam's and torch's own.

They are looked at from the relay's thread. A call of torch's own is known by the frame of the thread that is in it, and
its number by the count of collectives that torch keeps for each group.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import attrs
import torch

from flatparam_comm.errors import describe_call
from flatparam_comm.process_group import c10d, groups
from flatparam_guard.activity import ACTIVITY
from flatparam_guard.calls import GroupCalls
from flatparam_guard.failure import FailureReport

__all__ = ["Stand", "Wait", "WaitWatch", "place_of"]

#: Calls of torch in which a rank waits for one other rank, which torch does not count as a collective.
_BETWEEN_TWO: Final = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
#: Where `new_group` waits.
_MAKING: Final = ("_new_process_group_helper", "_store_based_barrier")
#: The number of a collective that torch does not count.
_UNCOUNTED: Final = 1
_OF_TORCH: Final = str(Path(torch.__file__).parent)


@final
@attrs.frozen
class Wait:
    """A wait until each of `members`, ranks of the world, has issued collective `number` of a group."""

    group: str
    """The name by which the collectives are counted."""
    number: int
    members: tuple[int, ...]
    text: str
    """The call that waits: `all_gather 'blocks.1'`."""
    is_torchs: bool = False
    """Whether it is a call of torch's own: then `number` is the group's, and not all members may be waited for."""
    at: int = 0
    """The number of the collective among all of the process group, torch's own too, or a later one; 0 if none."""


@final
@attrs.frozen
class Stand:
    """The waits of a rank, if all of its threads that issue collectives wait, and what it has issued."""

    key: int
    """It differs from that of every other stand of the rank."""
    waits: tuple[Wait, ...] = ()
    """Empty if the rank has failed, so that it will issue nothing."""
    counts: Mapping[str, int] = attrs.field(factory=dict)
    """The collectives that it has issued on each of its groups, by name."""
    of_torch: Mapping[str, int] = attrs.field(factory=dict)
    """The collectives that torch has counted on each process group, by name."""
    failure: FailureReport | None = None
    """The failure of a rank without waits."""

    @classmethod
    def from_words(cls, words: dict[str, Any]) -> Stand:
        """The stand that `to_words` has made."""
        waits = tuple(Wait(**{**each, "members": tuple(each["members"])}) for each in words["waits"])
        failure = words["failure"]
        told = None if failure is None else FailureReport.from_words(failure)
        return cls(words["key"], waits, words["counts"], words["of_torch"], told)

    def to_words(self) -> dict[str, Any]:
        """The stand as plain values."""
        return attrs.asdict(self)


@final
class WaitWatch:
    """Remembers what this process waits in, and since when."""

    def __init__(self, patience: float) -> None:
        """A process that is in the same waits for `patience` seconds stands."""
        self.patience = patience
        self._marks: tuple[object, ...] = ()
        self._key = 0
        self.due = 0.0
        """The moment at which it stands, if it goes on waiting."""

    def look(
        self, everything: Iterable[GroupCalls], failure: FailureReport | None, now: float
    ) -> Stand | None:
        """Where the process stands; None if it may go on by itself.

        Args:
            everything: the calls of its groups.
            failure: the failure of the rank, if it has failed and has not gone on.
        """
        calls = [*everything]
        found = _waits(calls)
        marks: tuple[object, ...] = tuple(mark for mark, _ in found or ())
        if failure is not None and not marks:
            marks = ("failed",)
        if len(marks) != len(self._marks) or any(
            mark is not before and mark != before for mark, before in zip(marks, self._marks, strict=True)
        ):
            self._marks = marks
            self.due = now + self.patience if marks else 0.0
            self._key += 1
        if not marks or now < self.due:
            return None
        counts = {each.name: each.begun for each in calls}
        return Stand(
            self._key,
            tuple(wait for _, wait in found or ()),
            counts,
            {name: c10d.count_of(group) for group, name in c10d.known_groups()},
            None if found else failure,
        )


def _waits(calls: list[GroupCalls]) -> list[tuple[object, Wait]] | None:
    """The wait of each thread that issues collectives, with a mark of it; None if one of them does not wait."""
    main = threading.main_thread().ident or 0
    found: list[tuple[object, Wait]] = []
    for thread in {*ACTIVITY.waits, main}:
        # Not as a variable: the frames of all threads, of which this is one, would keep each other alive.
        frame = sys._current_frames().get(thread)
        if frame is None:
            # Its number may be that of another thread soon.
            ACTIVITY.waits.pop(thread, None)
            continue
        mark = ACTIVITY.waits.get(thread)
        each = _wait_of_torchs(frame) if mark is None else _wait_of_ours(mark, calls)
        if each is not None:
            found.append(each)
        elif thread in ACTIVITY.waits or frame.f_code.co_filename != threading.__file__:
            # A main thread that waits for another thread, and has issued nothing itself, is no rank.
            return None
    return found or None


def _wait_of_ours(mark: tuple[Any, int, str, str], calls: list[GroupCalls]) -> tuple[object, Wait] | None:
    group, number, op, label = mark
    if group not in calls:
        return None
    text = describe_call(op, label)
    return mark, Wait(group.name, number, tuple(group.members), text, at=group.place_of(number))


def _wait_of_torchs(frame: FrameType) -> tuple[object, Wait] | None:
    """The call of torch's own that a thread with this innermost frame waits in, with a mark of it."""
    if frame.f_code.co_filename != c10d.source_file():
        return None
    name = frame.f_code.co_name
    if name in _MAKING:
        return _wait_of_new_group(frame)
    if name in _BETWEEN_TWO or "group" not in frame.f_code.co_varnames:
        return None
    group = groups.group_or_default(frame.f_locals.get("group"))
    if group is None:
        return None
    number = c10d.count_of(group)
    where = f"torch.distributed.{name}(), called at {place_of(frame)}"
    key = groups.name_of(group)
    wait = Wait(key, number, tuple(groups.members_of(group)), where, is_torchs=True, at=number)
    return (id(frame), key, number), wait


def _wait_of_new_group(frame: FrameType) -> tuple[object, Wait] | None:
    """The wait in `new_group`, which all ranks of the world call, unless they say otherwise."""
    maker = next((each for each in _outwards(frame) if each.f_code.co_name == "new_group"), None)
    world = groups.default_group()
    if maker is None or world is None or maker.f_locals.get("use_local_synchronization"):
        return None
    where = f"torch.distributed.new_group(), called at {place_of(maker)}"
    name = "torch.distributed.new_group()"
    members = tuple(groups.members_of(world))
    return (id(frame), name), Wait(name, _UNCOUNTED, members, where, is_torchs=True)


def place_of(frame: FrameType | None) -> str:
    """The innermost line of the program's own code: `train.py:30 in main`."""
    frames = [each for each in _outwards(frame) if not each.f_code.co_filename.startswith(_OF_TORCH)]
    if not frames:
        return "an unknown place"
    code = frames[0].f_code
    return f"{Path(code.co_filename).name}:{frames[0].f_lineno} in {code.co_name}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
