"""A rehearsal as one row of tokens: what repeats for each block is found in it, and a rehearsal is written of one."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final, final

import attrs

from flatparam_plan.hollow.arena import Log
from flatparam_plan.hollow.kernels import Work
from flatparam_plan.rehearsal import Entry, Rehearsal
from flatparam_plan.repeated.repeats import Shortened
from flatparam_plan.training import Call

_WINDOW: Final = 48
"""If so many tokens agree behind an insertion, it is the right one."""
_LISTS: Final = ("_foreach_", "stack", "cat", "linalg_vector_norm")
"""The beginnings of the names of kernels whose work grows with the number of tensors that they are given."""


@final
@attrs.frozen(eq=False)
class Tape:
    """The events of a rehearsal, in order: births and deaths of memory, kernels, and entries.

    Of each token there is its form, in which no block is named, and the block, as a run and a number in it.
    """

    found: Rehearsal
    counts: tuple[int, ...]
    """How many blocks each run has."""
    forms: list[Any]
    blocks: list[tuple[int, int] | None]

    @classmethod
    def of(cls, found: Rehearsal, short: Shortened) -> Tape:
        """Read a rehearsal of a program with few blocks."""
        forms: list[Any] = []
        blocks: list[tuple[int, int] | None] = []
        changes = _changes(found)
        at = 0
        for entry in found.entries:
            forms += changes[at : entry.place]
            at = entry.place
            if entry.kind == "kernels":
                forms += [("kernel", found.works[n]) for n in found.kernels[entry.start : entry.stop]]
            blocks += [None] * (len(forms) - len(blocks))
            place = short.place(entry.unit)
            form, block = (place, None) if isinstance(place, str) else (place[2], place[:2])
            forms.append(("entry", _form(entry), form, None if block is None else block[0]))
            blocks.append(block)
        forms += changes[at : found.stop]
        blocks += [None] * (len(forms) - len(blocks))
        return cls(found, short.counts, forms, blocks)

    def bare(self, known: dict[Any, int]) -> list[int]:
        """Return a number for each token, equal for those that agree for whichever block of a run."""
        return [known.setdefault(form, len(known)) for form in self.forms]


def without_sizes(form: Any) -> Any:
    """Return the form of an entry without its bytes."""
    kind, (what, stage, step, _, asked), *rest = form
    return (kind, what, stage, step, None if asked is None else (asked[0], asked[2]), *rest)


def _form(entry: Entry) -> Any:
    call = entry.call
    asked = None if call is None else (call.op, call.nbytes, call.members)
    return (entry.kind, entry.stage, entry.step, entry.nbytes, asked)


def _changes(found: Rehearsal) -> list[Any]:
    """Return a form for each birth and death: bytes, tag, and the stages in which the block was born and has died."""
    log = found.log
    stages: list[int] = []
    stage = 0
    for entry in found.entries:
        if entry.kind == "stage":
            stages += [stage] * (entry.place - len(stages))
            stage += 1
    stages += [stage] * (len(log) - len(stages))
    born: dict[int, int] = {}
    died: dict[int, int] = {}
    for at, change in enumerate(log.changes[: found.stop]):
        (born if change >= 0 else died)[change if change >= 0 else ~change] = stages[at]
    forms = []
    for change in log.changes[: found.stop]:
        number = change if change >= 0 else ~change
        kind = "born" if change >= 0 else "died"
        forms.append((kind, log.nbytes[number], log.tags[number], born[number], died.get(number, -1)))
    return forms


@final
@attrs.frozen(eq=False)
class Insertion:
    """The events that a longer run has at a place of the short tape, once for each further block."""

    at: int
    forms: list[Any]
    blocks: list[tuple[int, int] | None]
    """The blocks of the first copy, as they are numbered in the longer tape."""
    step: int
    """The step of the numbers from one copy to the next: 1, or -1 if the last block comes first."""


@final
@attrs.frozen(eq=False)
class Growth:
    """How a tape grows with a run."""

    run: int
    insertions: tuple[Insertion, ...]
    changed: dict[int, Any]
    """By places of the short tape, forms of the longer one: work that grows with the number of blocks."""
    late: set[int]
    """The places of the short tape at which the run's blocks are counted from its end."""
    more: int
    """The blocks that the longer tape has more."""


def compared(short: Tape, longer: Tape, run: int) -> Growth | None:
    """Return how `longer`, which has more blocks of a run, differs from `short`; `None` if not by what repeats."""
    return _Comparison.of(short, longer, run).growth()


@attrs.frozen(eq=False)
class _Comparison:
    """Two tapes, and numbers for their tokens that are equal if the forms are."""

    short: Tape
    longer: Tape
    run: int
    more: int
    mine: list[int]
    theirs: list[int]

    @classmethod
    def of(cls, short: Tape, longer: Tape, run: int) -> _Comparison:
        known: dict[Any, int] = {}
        more = longer.counts[run] - short.counts[run]
        return cls(short, longer, run, more, short.bare(known), longer.bare(known))

    def growth(self) -> Growth | None:
        """Go along both tapes: a token agrees, or the longer one repeats a piece, or it has more work there."""
        insertions: list[Insertion] = []
        changed: dict[int, Any] = {}
        late: set[int] = set()
        i = j = 0
        while i < len(self.mine) or j < len(self.theirs):
            if self._agree(i, j):
                if self._shift(i, j):
                    late.add(i)
                i, j = i + 1, j + 1
                continue
            found = self._repeated(i, j)
            if found is not None:
                insertions.append(found)
                j += self.more * len(found.forms)
            elif self._grows(i, j):
                changed[i] = self.longer.forms[j]
                i, j = i + 1, j + 1
            else:
                return None
        return Growth(self.run, tuple(insertions), changed, late, self.more)

    def _agree(self, i: int, j: int) -> bool:
        """Whether two tokens are the same, of the same block as counted from the beginning or the end of the run."""
        if i >= len(self.mine) or j >= len(self.theirs) or self.mine[i] != self.theirs[j]:
            return False
        block = self.short.blocks[i]
        if block is None or block[0] != self.run:
            return block == self.longer.blocks[j]
        return self._shift(i, j) in (0, self.more)

    def _shift(self, i: int, j: int) -> int:
        mine, theirs = self.short.blocks[i], self.longer.blocks[j]
        if mine is None or theirs is None or mine[0] != self.run:
            return 0
        return theirs[1] - mine[1]

    def _repeated(self, i: int, j: int) -> Insertion | None:
        """The piece that the longer tape repeats at `j`, and before it, so that it then agrees with the short one."""
        rest = len(self.theirs) - j - (len(self.mine) - i)
        best, found = 0, None
        for length in range(1, min(rest // self.more, j) + 1):
            agreed = self._agreed(i, j + self.more * length)
            if agreed <= best or not self._is_repeated(j, length):
                continue
            forms, blocks = (each[j : j + length] for each in (self.longer.forms, self.longer.blocks))
            step = _step(blocks, self.longer.blocks[j + length : j + 2 * length], self.run)
            if step is not None:
                best, found = agreed, Insertion(i, forms, blocks, step)
            if best == _WINDOW:
                break
        return found

    def _is_repeated(self, j: int, length: int) -> bool:
        first = self.theirs[j : j + length]
        starts = range(j - length, j + self.more * length, length)
        return all(self.theirs[start : start + length] == first for start in starts)

    def _agreed(self, i: int, j: int) -> int:
        """Return how many tokens agree from here on, at most so many as say enough; that many, if both end."""
        for number in range(_WINDOW):
            if i + number == len(self.mine) and j + number == len(self.theirs):
                return _WINDOW
            if not (self._agree(i + number, j + number) or self._grows(i + number, j + number)):
                return number
        return _WINDOW

    def _grows(self, i: int, j: int) -> bool:
        """Return whether two tokens are the same work on lists of different lengths, or what it takes."""
        if i >= len(self.mine) or j >= len(self.theirs):
            return False
        mine, theirs = self.short.forms[i], self.longer.forms[j]
        if mine[0] != theirs[0]:
            return False
        if mine[0] == "kernel":
            one, other = mine[1], theirs[1]
            return (one.name, one.dtype) == (other.name, other.dtype) and bool(one.name.startswith(_LISTS))
        if mine[0] == "entry":
            return self.short.blocks[i] is None and without_sizes(mine) == without_sizes(theirs)
        return mine[0] in ("born", "died") and bool(mine[2:] == theirs[2:] and mine[1] < theirs[1])


def _step(first: list[Any], second: list[Any], run: int) -> int | None:
    """By how much the block's number differs from one copy to the next; `None` if that is not the same for all."""
    steps = set()
    for one, other in zip(first, second, strict=True):
        if one is None or one[0] != run:
            if one != other:
                return None
            continue
        steps.add(other[1] - one[1])
    if not steps:
        return 1
    step: int = steps.pop()
    return step if not steps and step in (1, -1) else None


# A rehearsal that is written token by token


@final
@attrs.define(eq=False)
class Written:
    """A rehearsal that is being written, token by token."""

    log: Log = attrs.field(factory=Log)
    entries: list[Entry] = attrs.field(factory=list)
    works: dict[Work, int] = attrs.field(factory=dict)
    kernels: array[int] = attrs.field(factory=lambda: array("l"))
    _alive: dict[Any, list[int]] = attrs.field(factory=lambda: defaultdict(list))
    """The numbers of blocks of memory, by all that is known of them."""
    _calls: dict[Any, deque[Call]] = attrs.field(factory=lambda: defaultdict(deque))
    _start: int = 0

    def write(self, form: Any, block: str) -> None:
        """Write a token; `block` is the name of the block that it tells of."""
        kind = form[0]
        if kind == "kernel":
            self.kernels.append(self.number_of(form[1]))
        elif kind == "born":
            self.log.tag = form[2]
            self._alive[form[1:]].append(self.log.born(form[1]))
        elif kind == "died":
            self.log.died(self._alive[form[1:]].pop())
        else:
            _, (what, stage, step, nbytes, asked), inner, run = form
            name = inner if run is None else f"{block}.{inner}" if inner else block
            call = None if asked is None else self._call(what, name, asked)
            start = stop = 0
            if what == "kernels":
                start, stop = self._start, len(self.kernels)
                self._start = stop
            self.entries.append(Entry(what, stage, step, name, len(self.log), start, stop, nbytes, call))

    def repeat(self, pieces: Sequence[tuple[array[int], Any, Sequence[str]]], times: int) -> None:
        """Write tokens several times: kernels, or a form and the names of the block that each copy of it tells of."""
        log, kernels = self.log, self.kernels
        changes, sizes, nbytes, tags = log.changes, log.sizes, log.nbytes, log.tags
        # Of a thousand blocks most is births and deaths, so they are written here and not one by one.
        rows = [
            (
                0 if same else {"born": 1, "died": 2}.get(form[0], 3),
                same,
                form,
                self._alive[form[1:]] if form and form[0] in ("born", "died") else [],
                names,
            )
            for same, form, names in pieces
        ]
        for copy in range(times):
            for kind, same, form, alive, names in rows:
                if kind == 1:
                    number = len(nbytes)
                    nbytes.append(form[1])
                    tags.append(form[2])
                    log.in_use += form[1]
                    changes.append(number)
                    sizes.append(log.in_use)
                    alive.append(number)
                elif kind == 2:
                    log.in_use -= form[1]
                    changes.append(~alive.pop())
                    sizes.append(log.in_use)
                elif kind == 3:
                    self.write(form, names[copy])
                else:
                    kernels.extend(same)

    def number_of(self, work: Work) -> int:
        """Return the number of a kernel's work."""
        return self.works.setdefault(work, len(self.works))

    def _call(self, what: str, label: str, asked: tuple[str, int, tuple[int, ...]]) -> Call:
        """Return the collective that is issued, or that was issued first of those that are waited for."""
        op, nbytes, members = asked
        waiting = self._calls[label, asked]
        if what == "waited":
            return waiting.popleft()
        call = Call(op, label, nbytes, members)
        waiting.append(call)
        return call
