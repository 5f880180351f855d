"""A rehearsal that is written token by token."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, final

import attrs

from flatparam_plan.hollow import Log, Work
from flatparam_plan.rehearsal import Entry
from flatparam_plan.training import Call

__all__ = ["Written"]


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
        """The number of a kernel's work."""
        return self.works.setdefault(work, len(self.works))

    def _call(self, what: str, label: str, asked: tuple[str, int, tuple[int, ...]]) -> Call:
        """The collective that is issued, or that was issued first of those that are waited for."""
        op, nbytes, members = asked
        waiting = self._calls[label, asked]
        if what == "waited":
            return waiting.popleft()
        call = Call(op, label, nbytes, members)
        waiting.append(call)
        return call
