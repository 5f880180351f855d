"""The engine behind `run_threads`: a rank's end of a world of threads."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import attrs
from torch import Tensor

from flatparam_comm import checks
from flatparam_comm.collectives import Pending, ReduceOp
from flatparam_comm.errors import CollectiveError, DeadlockError, MismatchError, told_by_ranks
from flatparam_comm.threads.baton import Baton, ErrorFactory, Waiting
from flatparam_comm.threads.meeting import Meeting, MeetingCall, MeetingGroup, Post
from flatparam_comm.threads.transfer import (
    Cargo,
    Staged,
    stage_all_gather,
    stage_all_to_all,
    stage_broadcast,
    stage_reduction,
)


@final
class ThreadWorld:
    """The state that the ranks of one `run_threads` share: the baton, and the groups with their open meetings.

    With `deliver_late` the bytes of a result reach its output in the rank's own `wait()`, as late as any engine may
    deliver them; without it, when the last rank posts, as early as any engine can.
    """

    __slots__ = ("baton", "deliver_late", "groups")

    def __init__(self, size: int, *, deliver_late: bool) -> None:
        """Make a world of `size` ranks, and its first group, which has all of them."""
        self.baton = Baton(size, self._stuck)
        self.deliver_late = deliver_late
        self.groups = [MeetingGroup(tuple(range(size)))]

    def collectives(self, rank: int) -> ThreadCollectives:
        """Return the end of the world's group that belongs to `rank`."""
        return ThreadCollectives(self, self.groups[0], rank)

    def add_group(self, members: tuple[int, ...]) -> MeetingGroup:
        """Return a new group of these ranks of the world."""
        group = MeetingGroup(members)
        self.groups.append(group)
        return group

    def left_open(self) -> str:
        """Return a text of the collectives that some ranks called and others never did; empty if there are none."""
        return "\n".join(
            meeting.describe("these ranks have all finished")
            for group in self.groups
            for meeting in group.open.values()
        )

    def _stuck(self, doing: Sequence[tuple[int, str]]) -> ErrorFactory:
        """Return the error if no rank can go on: ranks diverge, or wait in a circle."""
        for group in self.groups:
            for meeting in group.open.values():
                if not meeting.agrees():
                    return _mismatch(meeting)
        advice = "make every rank call the same collectives in the same order"
        text = told_by_ranks("no rank can go on", doing, advice)
        return lambda rank, op, label: DeadlockError(rank, op, label, text)


@final
class ThreadCollectives:
    """`run_threads` passes this to each rank's function; a group made by `subgroup` is one, too.

    Only the rank's own thread may use it. For each kind of call, the checks, the order and the errors are those of a
    process group, and a program that would hang there raises `DeadlockError` or `MismatchError` here at once.
    """

    __slots__ = ("_group", "_rank", "_world", "_world_rank", "__weakref__")

    def __init__(self, world: ThreadWorld, group: MeetingGroup, rank: int) -> None:
        """Make the end of `group` that belongs to its rank number `rank`."""
        self._world = world
        self._group = group
        self._rank = rank
        self._world_rank = group.members[rank]

    def __repr__(self) -> str:
        return f"ThreadCollectives(rank={self.rank}, size={self.size})"

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self._group.members)

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Meet the other threads, and copy every rank's shard."""
        site = checks.site_of(self, "all_gather", label)
        checks.check_all_gather(site, output, shard)
        return self._move(Cargo(site, shard, output), "", stage_all_gather)

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Meet the other threads, and add in rank order, in the dtype of `full`."""
        site = checks.site_of(self, "reduce_scatter", label)
        checks.check_reduce_scatter(site, output, full, op)
        return self._move(Cargo(site, full, output), op.value, partial(stage_reduction, op=op, scatter=True))

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Meet the other threads, and add in rank order, in the tensor's dtype."""
        site = checks.site_of(self, "all_reduce", label)
        checks.check_all_reduce(site, tensor, op)
        return self._move(Cargo(site, tensor, tensor), op.value, partial(stage_reduction, op=op, scatter=False))

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Meet the other threads, and copy the tensor of `root`."""
        site = checks.site_of(self, "broadcast", label)
        checks.check_broadcast(site, tensor, root)
        return self._move(Cargo(site, tensor, tensor), f"root {root}", partial(stage_broadcast, root=root))

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Meet the other threads, and copy what each gives this rank."""
        site = checks.site_of(self, "all_to_all", label)
        checks.check_all_to_all(site, output, given, output_numels, given_numels)
        cargo = Cargo(site, given, output, tuple(given_numels), tuple(output_numels))
        return self._move(cargo, "", stage_all_to_all)

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Meet the other threads; values are pickled and unpickled, so no rank gets another's object."""
        post = Post(MeetingCall("exchange", label), value=pickle.dumps(value))
        values = self._meet(post, lambda posts: [each.value for each in posts]).outcome
        return [pickle.loads(each) for each in values]

    def barrier(self, *, label: str = "") -> None:
        """Meet the other threads."""
        self._meet(Post(MeetingCall("barrier", label)), lambda posts: None)

    def subgroup(self, ranks: Sequence[int]) -> ThreadCollectives | None:
        """Meet the other threads, and make a group of these ranks in the same world."""
        chosen = checks.check_subgroup(checks.site_of(self, "subgroup", ""), ranks)
        members = tuple(self._group.members[rank] for rank in chosen)
        post = Post(MeetingCall("subgroup", detail=f"ranks {list(chosen)}"))
        group: MeetingGroup = self._meet(post, lambda posts: self._world.add_group(members)).outcome
        return ThreadCollectives(self._world, group, chosen.index(self.rank)) if self.rank in chosen else None

    def sleep(self, seconds: float) -> None:
        """Let the other ranks go on until all of them wait. The sleep takes no time: the world's clock is moved."""
        self._world.baton.check_thread(self._world_rank, "sleep", "")
        self._world.baton.pause(self._world_rank, seconds)

    def _move(self, cargo: Cargo, detail: str, stage: Callable[..., Staged]) -> Pending:
        """Post a data-plane call. `stage` computes the results, on the rank that posts last."""
        source = cargo.source
        call = MeetingCall(
            cargo.site.op,
            cargo.site.label,
            # Ranks that agree may give different numbers of elements.
            0 if cargo.given_numels else source.numel(),
            source.dtype,
            device=str(source.device),
            detail=detail,
        )
        stage = partial(stage, late=self._world.deliver_late)
        meeting = self._post(
            Post(call, cargo), lambda posts: stage([post.cargo for post in posts if post.cargo is not None])
        )
        return ThreadPending(self._world.baton, self._world_rank, self._rank, cargo, meeting)

    def _meet(self, post: Post, work_out: Callable[[Sequence[Post]], Any]) -> Meeting:
        """Post a control-plane call, and return when every rank has made it."""
        meeting = self._post(post, work_out)
        waiting = Waiting(post.call.op, post.call.label, meeting.missing)
        self._world.baton.block(self._world_rank, lambda: meeting.complete, waiting)
        return meeting

    def _post(self, post: Post, work_out: Callable[[Sequence[Post]], Any]) -> Meeting:
        """Join the group's next meeting; if this rank is the last and all calls agree, conclude the meeting."""
        baton, rank, call = self._world.baton, self._world_rank, post.call
        baton.check_thread(rank, call.op, call.label)
        if baton.failed:
            raise baton.error(rank, call.op, call.label)
        meeting = self._group.join(self._rank, post)
        if meeting.full:
            if not meeting.agrees():
                baton.fail(_mismatch(meeting))
                raise baton.error(rank, call.op, call.label)
            self._conclude(meeting, call, work_out)
        return meeting

    def _conclude(self, meeting: Meeting, call: MeetingCall, work_out: Callable[[Sequence[Post]], Any]) -> None:
        try:
            self._group.conclude(meeting, work_out)
        except CollectiveError:
            raise
        except Exception as error:
            raise CollectiveError(
                self._rank, call.op, call.label, f"the result could not be computed: {type(error).__name__}: {error}"
            ) from error


@final
@attrs.define(eq=False)
class ThreadPending:
    """The pending of a rank's data-plane call. It holds the rank's tensors until `wait` returns."""

    baton: Baton
    world_rank: int
    rank: int
    cargo: Cargo | None
    meeting: Meeting

    def wait(self) -> None:
        """Hand the baton to other ranks until the last of them has posted, and take the result."""
        cargo, meeting = self.cargo, self.meeting
        if cargo is None:
            return
        site = cargo.site
        self.baton.check_thread(self.world_rank, site.op, site.label)
        waiting = Waiting(site.op, site.label, meeting.missing)
        self.baton.block(self.world_rank, lambda: meeting.complete, waiting)
        staged: Staged = meeting.outcome
        staged.deliver(self.rank, cargo)
        self.cargo = None

    def done(self) -> bool:
        """Return whether the collective is over; if it is not, the other ranks get a turn before the answer."""
        if not self._over() and self.baton.belongs_here(self.world_rank):
            self.baton.poll(self.world_rank)
        return self._over()

    def _over(self) -> bool:
        return self.meeting.complete or self.baton.failed


def _mismatch(meeting: Meeting) -> ErrorFactory:
    text = meeting.describe("make every rank call the same collectives, of the same sizes, in the same order")
    return lambda rank, op, label: MismatchError(rank, op, label, text)
