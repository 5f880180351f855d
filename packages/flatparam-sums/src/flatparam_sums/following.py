"""Gathers of ranks that have nothing to compute: they follow those that others make for a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, final

import attrs
import torch

from flatparam_comm import Collectives, Pending
from flatparam_runtime import DivergenceError, FlatParamError, Topology, Unit, UnitTree
from flatparam_runtime.agreement.fingerprint import Acting, Deed
from flatparam_runtime.passes.record import ForwardPass

Numbers: TypeAlias = "tuple[int, ...]"
"""Units, by their numbers in the tree."""

WORKS: Final = -1
"""The message of a rank that begins a micro-batch."""
HAS_ENDED: Final = -2
"""The message of a rank whose data have ended; another one that has no micro-batch left tells what it has done."""
_LABEL: Final = "micro-batches"
_OVER: Final = "the end of its micro-batch"
_HINT: Final = (
    "every micro-batch must call the same units in the same order, on every rank (guard data-dependent branches so "
    "that all take the same one)"
)


@final
@attrs.frozen
class Forward:
    """The last forward pass, on which depends what the next one is like."""

    began: Numbers
    ended: Numbers
    recorded: bool
    calls_before: int

    @classmethod
    def last_of(cls, tree: UnitTree) -> Forward | None:
        """Return the last one of `tree`; None before its first one."""
        last = tree.last_forward
        if last is None:
            return None
        began, ended = (tuple(u.observers.number for u in units) for units in (last.began, last.ended))
        return cls(began, ended, last.recorded, 0 if last.recorded else last.calls_before)

    def become_last_of(self, tree: UnitTree) -> None:
        """Have the next pass of `tree` be like that of a rank that has run this one."""
        made = ForwardPass(self.recorded, tree.streams.current(), self.calls_before)
        for number in self.began:
            made.begin(tree.units[number])
        made.ended.extend(tree.units[number] for number in self.ended)
        tree.last_forward = made


Kind: TypeAlias = "tuple[Numbers, Forward | None]"
"""The units that have no full parameters when a micro-batch begins, and the forward pass before: what it gathers
depends on these."""


@final
@attrs.frozen
class Followed:
    """The deeds of a micro-batch that others follow: the units that it gathers, in order, and its last forward pass."""

    gathered: Numbers
    forward: Forward | None


@final
@attrs.define(eq=False)
class Following:
    """The ranks that share the parameters of one tree, some of which may have fewer micro-batches than others.

    Before the first micro-batch of its kind nobody knows which units it gathers: there each rank tells each gather, and
    waits, so that ranks without one can do the same. From then on a rank tells that a micro-batch begins, and does not
    wait; ranks without one gather what was recorded.
    """

    tree: UnitTree
    shard: Collectives
    records: dict[Kind, Followed] = attrs.field(factory=dict)
    _told: list[tuple[Pending, torch.Tensor]] = attrs.field(factory=list)
    """The messages that were sent and not waited for."""

    @classmethod
    def of(cls, tree: UnitTree) -> Following:
        """Return those of `tree`.

        Raises:
            FlatParamError: if its units are sharded over different ranks, or each forward pass broadcasts buffers.
        """
        for unit in tree.units:
            if {*unit.topology.groups} != {*tree.root.topology.groups}:
                raise FlatParamError(
                    f"unit {unit.name!r}, rank {unit.topology.rank}: expected all units over the same ranks, found "
                    f"one over others than {tree.root.name!r}; wrap all with the same process group or mesh. If it "
                    "holds experts, they compute with tokens of other ranks, whose weights differ: multiply the loss "
                    "by its weight times the number of ranks over the sum of all weights, and give accumulate() none"
                )
        if tree.root.plan.broadcast_buffers:
            raise FlatParamError(
                f"rank {tree.root.topology.rank}: expected no buffers to broadcast in each forward pass, in which a "
                "rank without a micro-batch would have no part; make the root with broadcast_buffers=False"
            )
        return cls(tree, tree.root.topology.shard)

    def kind(self) -> Kind | None:
        """Return the kind of a micro-batch that begins now; None if it has nothing to gather over several ranks."""
        units = self.tree.units if self.shard.size > 1 else ()
        lacking = tuple(n for n, unit in enumerate(units) if unit.handles and unit.gather is None)
        return (lacking, Forward.last_of(self.tree)) if lacking else None

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Compute a micro-batch inside; the ranks without one gather what this one gathers.

        Raises:
            FlatParamError: if it gathers other units than the first one of its kind did.
        """
        self.tree.settle_leftovers()
        kind, gathered = self.kind(), list[int]()
        record = None if kind is None else self.records.get(kind)
        is_led = kind is not None and record is None
        if record is not None:
            self._tell(WORKS)
        expected = () if record is None else record.gathered

        def note(unit: Acting, number: int, nbytes: int) -> None:
            if unit.topology.shard.size == 1:
                return
            if is_led:
                self._check(self._exchange(Deed.of("gather", unit, nbytes)))
            elif expected[len(gathered) : len(gathered) + 1] != (number,):
                raise self._different(expected, len(gathered), f"gathers unit {unit.name!r}")
            gathered.append(number)

        with self._scripted(note):
            yield
        self._rest()
        done = Followed(tuple(gathered), Forward.last_of(self.tree))
        if is_led:
            assert kind is not None, "others follow"
            self._check(self._exchange(done))
            self.records[kind] = done
        elif record is not None and done != record:
            raise self._different(expected, len(gathered), "ends")

    def meet(self, value: int) -> list[int]:
        """Follow the other ranks' micro-batches; return what each rank has told once none has another one.

        Args:
            value: what this rank has done, see `told`, or `HAS_ENDED`.
        """
        while True:
            self.tree.settle_leftovers()
            kind = self.kind()
            if kind is not None and kind not in self.records:
                told = self._follow_each(kind, value)
                if told is not None:
                    return told
                continue
            values = self._told_by_all(value)
            if WORKS not in values:
                return values
            assert kind is not None, "a rank without anything to gather tells nothing"
            record = self.records[kind]
            for number in record.gathered:
                self._gather(self.tree.units[number])
            self._have_followed(record)

    def _follow_each(self, kind: Kind, value: int) -> list[int] | None:
        """Gather what other ranks tell, one by one; returns what all have told if none has another micro-batch."""
        while True:
            everyone = self._exchange(value)
            done = next((each for each in everyone if not isinstance(each, int)), None)
            if done is None:
                return everyone
            self._check(everyone)
            if isinstance(done, Followed):
                self.records[kind] = done
                self._have_followed(done)
                return None
            self._gather(next(each for each in self.tree.units if each.name == done.unit))

    def _have_followed(self, record: Followed) -> None:
        if record.forward is not None:
            record.forward.become_last_of(self.tree)

    def _gather(self, unit: Unit) -> None:
        with self._scripted(_say_nothing):
            unit.begin_unshard(full_precision=unit.computes_in_full_precision, alone=True)
            unit.finish_unshard()
        if unit.plan.free_after_unsynced_backward:
            unit.reshard()
        else:
            self.tree.keeps_unsharded = True

    def _rest(self) -> None:
        """Leave the units as ranks do that have only followed."""
        for unit in self.tree.units:
            if unit.plan.free_after_unsynced_backward and not unit.is_needed:
                unit.reshard()

    @contextmanager
    def _scripted(self, script: Any) -> Iterator[None]:
        self.tree.fingerprint.script = script
        try:
            yield
        finally:
            self.tree.fingerprint.script = None

    # What ranks tell each other

    def _exchange(self, value: Any) -> list[Any]:
        return Topology(self.shard).exchange(value, label=_LABEL)

    def _check(self, everyone: Sequence[Any]) -> None:
        """Check that all ranks that compute do the same."""
        deeds = [(rank, each) for rank, each in enumerate(everyone) if not isinstance(each, int)]
        if any(deed != deeds[0][1] for _, deed in deeds):
            told = ", ".join(
                f"rank {rank} at {_OVER if isinstance(deed, Followed) else f'the {deed}'}" for rank, deed in deeds
            )
            raise DivergenceError(
                f"rank {self.shard.rank}: the micro-batches of the ranks gather different units: {told}; {_HINT}"
            )

    def _different(self, expected: Numbers, place: int, what: str) -> FlatParamError:
        is_next = f"unit {self.tree.units[expected[place]].name!r} is next" if place < len(expected) else "it ends"
        return FlatParamError(
            f"rank {self.shard.rank}: a micro-batch {what} after {place} gathers, where {is_next} by the first one of "
            f"its kind, which ranks without one follow; {_HINT}"
        )

    def _tell(self, value: int) -> torch.Tensor:
        """Tell all ranks a number of 8 bytes, without waiting; returns where those of all ranks are to be."""
        everyone = torch.empty(self.shard.size, dtype=torch.int64, device=self.tree.root.device)
        own = torch.tensor([value], dtype=torch.int64, device=everyone.device)
        self._told.append((self.shard.all_gather(everyone, own, label=_LABEL), everyone))
        return everyone

    def _told_by_all(self, value: int) -> list[int]:
        everyone = self._tell(value)
        for pending, _ in self._told:
            pending.wait()
        self._told.clear()
        return everyone.tolist()


def _say_nothing(unit: Acting, number: int, nbytes: int) -> None:
    """Nothing: the gather is one that other ranks have told of."""
