"""The waits of this process for other ranks; and whether it, or its host, waits for nothing that will come.

They are looked at from the relay's thread. A call of torch's own is known by the frame of the thread that is in it, and
its number by the count of collectives that torch keeps for each group.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import attrs
import torch

from flatparam_comm.errors import describe_call, told_by_ranks, told_ranks
from flatparam_comm.process_group import groups
from flatparam_guard import torch_groups
from flatparam_guard.activity import ACTIVITY
from flatparam_guard.failure import FailureReport
from flatparam_guard.group_calls import GroupCalls
from flatparam_guard.positions import Standing

#: Calls of torch in which a rank waits for one other rank, which torch does not count as a collective.
_BETWEEN_TWO: Final = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
#: Where `new_group` waits; from torch 2.14 on in a function that the first of them calls.
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
        """Return the stand that `to_words` has made."""
        waits = tuple(Wait(**{**each, "members": tuple(each["members"])}) for each in words["waits"])
        failure = words["failure"]
        told = None if failure is None else FailureReport.from_words(failure)
        return cls(words["key"], waits, words["counts"], words["of_torch"], told)

    def to_words(self) -> dict[str, Any]:
        """Return the stand as plain values."""
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

    def look(self, everything: Iterable[GroupCalls], failure: FailureReport | None, now: float) -> Stand | None:
        """Return where the process stands; None if it may go on by itself.

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
            {name: torch_groups.count_of(group) for group, name in torch_groups.known_groups()},
            None if found else failure,
        )


def _waits(calls: list[GroupCalls]) -> list[tuple[object, Wait]] | None:
    """Return the wait of each thread that issues collectives, with a mark of it; None if one of them does not wait."""
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
    """Return the call of torch's own that a thread with this innermost frame waits in, with a mark of it."""
    if frame.f_code.co_filename != torch_groups.source_file():
        return None
    name = frame.f_code.co_name
    if name in _MAKING or (frame.f_back is not None and frame.f_back.f_code.co_name in _MAKING):
        return _wait_of_new_group(frame)
    if name in _BETWEEN_TWO or "group" not in frame.f_code.co_varnames:
        return None
    group = torch_groups.group_or_default(frame.f_locals.get("group"))
    if group is None:
        return None
    try:
        members = tuple(groups.members_of(group))
    except (KeyError, ValueError):  # somebody is destroying it, maybe in this very call
        return None
    key, number = groups.name_of(group), torch_groups.count_of(group)
    where = f"torch.distributed.{name}(), called at {_place_of(frame)}"
    return (id(frame), key, number), Wait(key, number, members, where, is_torchs=True, at=number)


def _wait_of_new_group(frame: FrameType) -> tuple[object, Wait] | None:
    """Return the wait in `new_group`, which all ranks of the world call, unless they say otherwise."""
    maker = next((each for each in _outwards(frame) if each.f_code.co_name == "new_group"), None)
    world = groups.default_group()
    if maker is None or world is None or maker.f_locals.get("use_local_synchronization"):
        return None
    where = f"torch.distributed.new_group(), called at {_place_of(maker)}"
    name = "torch.distributed.new_group()"
    members = tuple(groups.members_of(world))
    return (id(frame), name), Wait(name, _UNCOUNTED, members, where, is_torchs=True)


def _place_of(frame: FrameType | None) -> str:
    """Return the innermost line of the program's own code: `train.py:30 in main`."""
    frames = [each for each in _outwards(frame) if not each.f_code.co_filename.startswith(_OF_TORCH)]
    if not frames:
        return "an unknown place"
    code = frames[0].f_code
    return f"{Path(code.co_filename).name}:{frames[0].f_lineno} in {code.co_name}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# A process that issues nothing: whether it has failed in the program's own code, and lives.
#
# Nobody tells of such an exception: it came out of no call of flatparam's. But if the main thread handles it for
# long, as in an `except` block, or a prompt has printed it, and the process does not compute, then it does not go on
# by itself.


#: The part of the time that a process may compute which does nothing: its threads wake now and then.
_BUSY: Final = 0.1
#: What Linux counts of the main thread: nanoseconds on a core, nanoseconds of waiting for one.
_SCHEDULED: Final = Path("/proc/self/schedstat")
#: The exceptions by which programs decide what to do next: there is no more data, no cache, no such package.
_DECIDES: Final = (
    *(StopIteration, StopAsyncIteration, GeneratorExit, LookupError),
    *(AttributeError, ImportError, EOFError, OSError),
)


@final
class IdleWatch:
    """Remembers since when this process has issued nothing."""

    def __init__(self, rank: int, patience: float) -> None:
        """A process of `rank` that issues nothing for `patience` seconds is looked at."""
        self._rank = rank
        self.patience = patience
        self._issued = -1
        self._since = self._computed = 0.0
        # An exception that was printed before has stopped nobody.
        self._printed = id(_printed())
        self._printed_after = -1

    def look(self, now: float) -> FailureReport | None:
        """Return the failure of the process, if it has one and does nothing about it."""
        if ACTIVITY.issued != self._issued or any(ACTIVITY.waits.values()):
            self._issued, self._since, self._computed = ACTIVITY.issued, now, _computed()
        printed = _printed()
        if id(printed) != self._printed:
            self._printed, self._printed_after = id(printed), ACTIVITY.issued
        error = _handled() or (printed if self._printed_after == ACTIVITY.issued else None)
        idle = now - self._since
        is_busy = _computed() - self._computed > _BUSY * idle
        if error is None or idle < self.patience or is_busy:
            return None
        main = threading.main_thread().ident or 0
        place = _place_of(sys._current_frames().get(main))
        return FailureReport.of(self._rank, error, f"the program's own code, and is at {place} for {idle:.0f} s,")


def _computed() -> float:
    """The seconds for which this process has computed, or for which its main thread was ready to and had no core."""
    try:
        waited = int(_SCHEDULED.read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        # Only Linux counts them.
        waited = 0.0
    return time.process_time() + waited


def _handled() -> BaseException | None:
    """The exception that the main thread handles, unless programs decide by it, or it has issued something since."""
    found = sys._current_exceptions().get(threading.main_thread().ident or 0)
    # From Python 3.11 on the exception itself is there; before, a triple with it in the middle.
    error = found[1] if isinstance(found, tuple) else found
    if not isinstance(error, BaseException) or isinstance(error, _DECIDES) or id(error) == ACTIVITY.handled:
        return None
    return error


def _printed() -> BaseException | None:
    """Return the exception that an interactive prompt has printed last."""
    found = getattr(sys, "last_value", None)
    return found if isinstance(found, BaseException) else None


# Ranks of a host that stay at different collectives: a warning in the log lists what each of them has issued.
#
# A backend that waits on the device, as NCCL does, says nothing until its own timeout; then it is too late to look.


@final
@attrs.define
class _Seen:
    """The numbers of collectives that the ranks of a group had issued, since a moment."""

    counts: dict[int, int]
    since: float
    is_told: bool = False


@final
@attrs.define(eq=False)
class StallWatch:
    """Remembers how far the ranks of each group were, and since when."""

    rank: int
    patience: float
    """The seconds that ranks may stay at different collectives."""
    _groups: dict[str, _Seen] = attrs.field(factory=dict)

    def look(self, name: str, ranks: Mapping[int, Standing], now: float) -> str | None:
        """The warning about the group `name`, if its ranks have not moved for long and are at different collectives.

        One rank of a host warns, and once: the lowest of those that are furthest.

        Args:
            ranks: the last collective of each rank of this host, this one too, by its number in the world.
            now: the time in seconds.
        """
        counts = {rank: standing.number for rank, standing in ranks.items()}
        seen = self._groups.get(name)
        if seen is None or seen.counts != counts:
            self._groups[name] = _Seen(counts, now)
            return None
        furthest = max(counts.values())
        is_mine = self.rank == min(rank for rank, count in counts.items() if count == furthest)
        if seen.is_told or not is_mine or min(counts.values()) == furthest or now < seen.since + self.patience:
            return None
        seen.is_told = True
        late = [rank for rank, count in counts.items() if count < furthest]
        claim = (
            f"for {self.patience:g} s no rank of this host has gone on, and those of group {name!r} have issued "
            "different numbers of collectives"
        )
        rows = [(rank, f"has issued {standing}") for rank, standing in sorted(ranks.items())]
        advice = (
            f"what is behind, {told_ranks(late)}, computes, loads data, writes a file, or does not make the call that "
            "the others wait in: look at where it is, by `py-spy dump --pid`, say"
        )
        return told_by_ranks(claim, rows, advice)
