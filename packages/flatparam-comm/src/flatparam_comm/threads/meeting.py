"""The meetings of a world of threads: the n-th collective of every rank of a group is one meeting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from flatparam_comm.errors import describe_call, told_by_ranks, told_ranks
from flatparam_comm.threads.transfer import Cargo


@attrs.frozen
class MeetingCall:
    """A rank's call. Two calls agree if everything but their labels is equal.

    `detail` is the reduction, the root or the ranks, as text; `numel` and `dtype` are those of this rank's input.
    """

    op: str
    label: str = attrs.field(default="", eq=False)
    numel: int = 0
    dtype: torch.dtype | None = None
    device: str = ""
    detail: str = ""

    def describe(self) -> str:
        """Return the text for an error."""
        facts = [self.detail] if self.detail else []
        if self.dtype is not None:
            facts.append(f"{self.numel} x {str(self.dtype).removeprefix('torch.')} on {self.device}")
        return describe_call(self.op, self.label) + (f" ({', '.join(facts)})" if facts else "")


@attrs.define(eq=False)
class Post:
    """One rank's part of a meeting: its call, and its tensors or its one pickled value."""

    call: MeetingCall
    cargo: Cargo | None = None
    value: bytes = b""


@attrs.define(eq=False)
class Meeting:
    """One collective. It is `complete` when every rank has posted and `outcome` has been computed."""

    number: int
    members: tuple[int, ...]
    posts: list[Post | None]
    complete: bool = False
    outcome: Any = None

    @property
    def full(self) -> bool:
        """Whether every rank has posted."""
        return None not in self.posts

    def agrees(self) -> bool:
        """Return whether all calls so far agree."""
        calls = [post.call for post in self.posts if post is not None]
        return all(call == calls[0] for call in calls)

    def missing(self) -> str:
        """Return a text of the ranks that have not called yet, by their numbers in the world."""
        absent = [rank for rank, post in zip(self.members, self.posts, strict=True) if post is None]
        group = f"call {self.number} of the group of ranks {told_ranks(self.members)}"
        return f"{group}; not called by {told_ranks(absent)}"

    def describe(self, advice: str) -> str:
        """Return a text that says that the ranks' calls differ, and what each has called."""
        said = [
            (rank, "has not called yet" if post is None else f"called {post.call.describe()}")
            for rank, post in zip(self.members, self.posts, strict=True)
        ]
        group = f"call {self.number} of the group of ranks {told_ranks(self.members)}"
        return told_by_ranks(f"the ranks' calls differ: in {group}", said, advice)


@attrs.define(eq=False)
class MeetingGroup:
    """The meetings of one group. `members` are its ranks' numbers in the world; its own ranks are their positions.

    `open` has only meetings that are not complete, so memory does not grow in a long run; a complete meeting lives as
    long as a pending refers to it.
    """

    members: tuple[int, ...]
    calls: list[int] = attrs.field(init=False)
    open: dict[int, Meeting] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.calls = [0] * len(self.members)

    def join(self, rank: int, post: Post) -> Meeting:
        """Return this rank's next meeting, with its post in it."""
        number = self.calls[rank]
        self.calls[rank] += 1
        meeting = self.open.get(number)
        if meeting is None:
            meeting = self.open[number] = Meeting(number, self.members, [None] * len(self.members))
        meeting.posts[rank] = post
        return meeting

    def conclude(self, meeting: Meeting, work_out: Callable[[Sequence[Post]], Any]) -> None:
        """Complete a meeting that is full."""
        meeting.outcome = work_out([post for post in meeting.posts if post is not None])
        meeting.complete = True
        # The inputs have been read; the pendings hold the tensors that must live longer.
        for post in meeting.posts:
            if post is not None:
                post.cargo = None
        del self.open[meeting.number]
