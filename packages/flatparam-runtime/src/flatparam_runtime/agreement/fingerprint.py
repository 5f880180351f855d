"""The collectives that a rank's units issued, in order, and as one number."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final, Literal, Protocol, TypeAlias, final
from zlib import crc32

import attrs

from flatparam_comm import FlatParamHandle, Threshold, Topology, Transitions

DeedKind: TypeAlias = Literal["step", "gather", "reduce", "train"]


class Acting(Protocol):
    """Anything that issues collectives, as a unit does."""

    @property
    def name(self) -> str:
        """The name in messages."""

    @property
    def handles(self) -> Sequence[FlatParamHandle]:
        """The flat parameters that it gathers and reduces."""

    @property
    def topology(self) -> Topology:
        """The ranks that take part in its collectives."""


@final
@attrs.frozen
class Deed:
    """One collective of one unit, a change of the parameters that the unit trains, or what is done between passes.

    `nbytes` is the size of the full parameters or gradients; for a change, it is a checksum of what is trained from
    now on, and for a step, or anything else between passes, one of its description.
    """

    kind: DeedKind
    unit: str
    nbytes: int
    parameters: tuple[str, ...] = attrs.field(eq=False)
    """The names of the first few parameters in the unit, which may differ; for a step, its description."""
    everywhere: bool = True
    """Whether every rank is to do it; otherwise a rank may have nothing to do it with."""

    @classmethod
    def of(cls, kind: DeedKind, unit: Acting, nbytes: int) -> Deed:
        """Return the deed of `unit`."""
        fqns = (fqn for handle in unit.handles for fqn in handle.layout.fqns)
        return cls(kind, unit.name, nbytes, tuple(islice(fqns, 3)))

    def __str__(self) -> str:
        if self.kind == "step":
            return self.parameters[0]
        names = ", ".join(self.parameters[:2]) + (", ..." if len(self.parameters) > 2 else "")
        if self.kind == "train":
            return f"change of requires_grad in unit {self.unit!r} ({names})"
        return f"{self.kind} of unit {self.unit!r} ({names}; {self.nbytes:,} bytes)"


FLAGS: Final = 16
"""The number of bytes by which fingerprints are compared."""


_KINDS: Final[dict[DeedKind, int]] = {"step": 0, "gather": 1, "reduce": 2, "train": 3}
#: The code of a step that ranks may leave out, if their optimizers list only what they have.
_OWN_STEP: Final = -1
#: The kinds of steps that are remembered for messages.
_STEPS: Final = 64
# The multiplier of Knuth's linear congruential generator for MMIX.
_MULTIPLIER: Final = 6364136223846793005
_MASK: Final = 2**64 - 1
LOG_LENGTH: Final = Threshold(
    "runtime.log_length",
    2**16,
    "The log of collectives since the ranks last agreed holds up to so many numbers, two for each; then it is cleared.",
    least=2,
)


class Progress(enum.Enum):
    """How far the ranks of a tree have come together without a divergence."""

    NEW = "they have not compared their units"
    BEGUN = "they have compared their units, and compare before each collective"
    INFERRED = "they have completed a forward pass that autograd does not record; they compare at the end of such ones"
    TRAINED = "they have completed a training step, and compare at the end of each pass"


PROGRESS: Final = Transitions(
    "progress of the ranks",
    {
        Progress.NEW: frozenset({Progress.BEGUN}),
        Progress.BEGUN: frozenset({Progress.INFERRED, Progress.TRAINED}),
        Progress.INFERRED: frozenset({Progress.INFERRED, Progress.TRAINED}),
        Progress.TRAINED: frozenset({Progress.TRAINED}),
    },
)


@final
@attrs.define(eq=False)
class Fingerprint:
    """A hash of every collective of a tree's units: one comparison detects whether ranks diverge.

    A unit counts by its place in the tree, which is the same on every rank. Trees of the same ranks have different
    values from their first pass on, also if their units are equal.
    """

    value: int = 0
    """A 64-bit hash of everything that was noted since the beginning, and that every rank notes."""
    own_steps: int = 0
    """A hash of the steps of what some ranks have nothing of: these may leave them out, and then list less."""
    compares_own_steps: bool = True
    """Whether no rank has been found to list less than there is."""
    listed: set[tuple[int, int]] = attrs.field(factory=set)
    """The parameters without elements on this rank that its optimizers list: the handle's identity, and the index."""
    script: Callable[[Acting, int, int], None] | None = None
    """A listener that is told of each gather, with the unit's number and the bytes, instead of the hash: ranks gather
    for others while they have nothing to compute."""
    before_each: Callable[[Topology, Deed], None] | None = None
    """A check before each collective, while `progress` asks for one."""
    progress: Progress = Progress.NEW
    noted: int = 0
    """The number of collectives since the beginning."""
    model: str = ""
    """The name of the tree in messages, once its ranks have agreed on it."""
    reductions: int = 0
    """The number of reductions since the beginning."""
    has_new_optimizer: bool = True
    """Whether an optimizer has stepped that had not before, or has other parameters: some may be in no unit."""
    _dropped: set[bool] = attrs.field(factory=set)
    """How gradients were dropped since the last reduction: on every rank, or on some."""
    _steps: dict[int, str] = attrs.field(factory=dict)
    """By the checksum of what was done between passes, its description."""
    _log: array[int] = attrs.field(factory=lambda: array("q"))
    """Two numbers for each collective: its code and its bytes. Bounded, since passes may go on without agreement."""

    @property
    def compares_at_end(self) -> bool:
        """Whether the ranks have completed some pass together."""
        return self.progress in (Progress.INFERRED, Progress.TRAINED)

    def advance(self, progress: Progress) -> None:
        """Take a step of the progress table; what was reached before stays reached."""
        # The graph of a pass may outlive the tree that it was made in: then a backward pass comes first in this one.
        is_first = self.progress is Progress.NEW and progress is not Progress.BEGUN
        if self.progress is not Progress.TRAINED and not is_first:
            self.progress = PROGRESS.move(self.progress, progress, who=f"model {self.model!r}")

    def begin_pass(self, *, recorded: bool, before_each: Callable[[Topology, Deed], None]) -> None:
        """Begin a pass, in which `before_each` checks each collective unless one comparison at the end is enough."""
        once = self.progress is Progress.TRAINED or (self.progress is Progress.INFERRED and not recorded)
        self.before_each = None if once else before_each

    def note(self, kind: DeedKind, unit: Acting, number: int, nbytes: int) -> None:
        """Add to the hash what `unit`, the unit `number` of its tree, is about to do."""
        if self.script is not None:
            if kind == "gather":
                self.script(unit, number, nbytes)
            return
        if self.before_each is not None:
            self.before_each(unit.topology, Deed.of(kind, unit, nbytes))
        if kind == "reduce":
            if self._dropped:
                self.note_step("zero_grad()", everywhere=True in self._dropped)
                self._dropped.clear()
            self.reductions += 1
        self._add(number * 4 + _KINDS[kind], nbytes)

    def note_drop(self, *, everywhere: bool = True) -> None:
        """Note that the gradients are dropped; how often, and when, does not matter until the next reduction."""
        if self.reductions:
            self._dropped.add(everywhere)

    def identify(self, number: int, model: str) -> None:
        """Be the fingerprint of the tree that the first rank counts as `number`, and `model` in messages."""
        self.value ^= (number * _MULTIPLIER) & _MASK
        self.model = model

    def note_step(self, step: str, *, everywhere: bool = True) -> None:
        """Add to the hash what is about to be done between passes: an optimizer's step, for example, and its settings.

        Args:
            step: in words, with the values that are to be the same on all ranks.
            everywhere: every rank has something of what is changed; otherwise some ranks may have no such step.
        """
        if not (everywhere or self.compares_own_steps):
            return
        checksum = crc32(step.encode())
        if checksum not in self._steps and len(self._steps) >= _STEPS:
            # A schedule changes the learning rate all the time.
            del self._steps[next(iter(self._steps))]
        self._steps[checksum] = step
        if everywhere:
            self._add(_KINDS["step"], checksum)
        else:
            self.own_steps = ((self.own_steps ^ self.value) * _MULTIPLIER + checksum) & _MASK
            self._log_one(_OWN_STEP, checksum)

    def forget_own_steps(self) -> None:
        """Leave out, from now on, what not every rank notes: the optimizers of some list only what these have."""
        self.own_steps, self.compares_own_steps = 0, False

    def _add(self, what: int, nbytes: int) -> None:
        self.value = ((self.value ^ what) * _MULTIPLIER + nbytes) & _MASK
        self._log_one(what, nbytes)

    def _log_one(self, what: int, nbytes: int) -> None:
        if len(self._log) >= LOG_LENGTH.value:
            del self._log[:]
        self._log.append(what)
        self._log.append(nbytes)
        self.noted += 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing was noted since the ranks last agreed that every rank notes."""
        return all(what == _OWN_STEP for what in self._log[::2])

    def deeds(self, units: Mapping[int, Acting]) -> list[Deed]:
        """Return the deeds that were noted since the ranks last agreed, for a message.

        Args:
            units: by number, units of the tree; deeds of others are left out.
        """
        kinds = {number: kind for kind, number in _KINDS.items()}
        pairs = zip(self._log[::2], self._log[1::2], strict=True)
        return [
            self._step(checksum, everywhere=what != _OWN_STEP)
            if what <= _KINDS["step"]
            else Deed.of(kinds[what % 4], units[what // 4], checksum)
            for what, checksum in pairs
            if what <= _KINDS["step"] or what // 4 in units
        ]

    def _step(self, checksum: int, *, everywhere: bool) -> Deed:
        told = self._steps.get(checksum, "step of an optimizer")
        return Deed("step", "", checksum, (told,), everywhere)

    def agreed(self, noted: int) -> None:
        """Drop the collectives up to number `noted` from the log: after that one all ranks had the same value."""
        kept = 2 * (self.noted - noted)
        del self._log[: max(0, len(self._log) - kept)]

    def flags(self) -> bytes:
        """16 bytes whose bytewise maximum over ranks is this rank's own exactly if all ranks have the same value."""
        value = (self.value ^ self.own_steps).to_bytes(8, "little")
        return value + bytes(255 - byte for byte in value)
