"""The rehearsal of many equal blocks, laid out from rehearsals of few."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, final

import attrs

from flatparam_comm import Totals
from flatparam_plan.costs import STAGES, Costs, Resting, StepCosts
from flatparam_plan.hollow.arena import Log
from flatparam_plan.rehearsal import Entry, Rehearsal, UnitFacts, rehearse
from flatparam_plan.repeated.repeats import SHORT, Shortened, Template, runs_of, shortened
from flatparam_plan.repeated.tape import Growth, Insertion, Tape, Written, compared
from flatparam_plan.training import Setup, TrainingProgram


def rehearse_repeated(
    program: TrainingProgram, template: Template, setup: Setup, *, steps: int = 2
) -> Rehearsal | None:
    """Return the result of `rehearse`, from rehearsals with few of the blocks; `None` if too few repeat, or not alike.

    Args:
        template: the model that the program makes.
    """
    runs = runs_of(template, setup)
    if not runs:
        return None
    short = shortened(program, template, setup, runs)
    base = Tape.of(rehearse(short.program, short.setup, steps=steps), short)
    growths, longer = [], []
    for number in range(len(runs)):
        more = shortened(program, template, setup, runs, number)
        tape = Tape.of(rehearse(more.program, more.setup, steps=steps), more)
        growth = compared(base, tape, number)
        if growth is None:
            return None
        growths.append(growth)
        longer.append(tape.found)
    return _Extension(setup, short, base, growths, longer).rehearsal()


@final
@attrs.frozen(eq=False)
class _Extension:
    """Rehearsals with few blocks, and how they grow."""

    setup: Setup
    short: Shortened
    base: Tape
    growths: Sequence[Growth]
    longer: Sequence[Rehearsal]
    """For each run, the rehearsal with some more of its blocks."""

    def rehearsal(self) -> Rehearsal | None:
        """Return the rehearsal with all blocks, or `None` if a number does not grow with them."""
        found = self.base.found
        if peaks(found.entries, found.log, found.stop) != _peaks_of(found.costs):
            return None
        written = Written()
        changed = self._changed()
        if changed is None:
            return None
        insertions = sorted(
            ((each.at, number, each) for number, growth in enumerate(self.growths) for each in growth.insertions),
            key=lambda item: item[:2],
        )
        at = 0
        forms, blocks = self.base.forms, self.base.blocks
        for stop, run, insertion in [*insertions, (len(forms), -1, None)]:
            for token in range(at, stop):
                written.write(changed.get(token, forms[token]), self._name_at(token, blocks[token]))
            at = stop
            if insertion is not None:
                self._repeat(written, run, insertion)
        costs = _grown_costs(
            found.costs,
            [each.costs for each in self.longer],
            [(self._more(run), growth.more) for run, growth in enumerate(self.growths)],
            peaks(written.entries, written.log, len(written.log)),
        )
        if costs is None:
            return None
        unmeasured = {name for each in (found, *self.longer) for name in each.unmeasured}
        return Rehearsal(
            self.setup,
            written.log,
            written.entries,
            list(written.works),
            written.kernels,
            tuple(self._units()),
            costs,
            found.steps,
            tuple(sorted(unmeasured)),
            len(written.log),
            True,
            found.notes,
        )

    def _more(self, run: int) -> int:
        """Return the blocks of a run that were left out."""
        return self.short.runs[run].count - SHORT

    def _name_at(self, token: int, block: tuple[int, int] | None) -> str:
        """Return the name of the block that a token of the short tape tells of."""
        if block is None:
            return ""
        run, number = block
        return self._named(run, number + self._more(run) * (token in self.growths[run].late))

    def _name_of(self, block: tuple[int, int] | None) -> str:
        """Return the name of a block, as it is numbered in the short tape."""
        if block is None:
            return ""
        run, number = block
        return self._named(run, number if number < SHORT // 2 else number + self._more(run))

    def _named(self, run: int, number: int) -> str:
        chosen = self.short.runs[run]
        return f"{chosen.container}.{chosen.start + number}" if chosen.container else str(chosen.start + number)

    def _repeat(self, written: Written, run: int, insertion: Insertion) -> None:
        """Write what a run's further blocks do."""
        more, step = self._more(run), insertion.step
        first = 0 if step > 0 else more - self.growths[run].more
        pieces = [
            (kernels, form, None if block is None or block[0] == run else self._name_of(block), block)
            for kernels, form, block in _pieces(insertion, written)
        ]
        shifts = range(first, first + step * more, step)
        # A block is named once in each copy, as many events as there are of it.
        names = {
            block[1]: [self._named(run, block[1] + shift) for shift in shifts]
            for block in insertion.blocks
            if block is not None and block[0] == run
        }
        written.repeat(
            [
                (kernels, form, names[block[1]] if block is not None and name is None else [name or ""] * more)
                for kernels, form, name, block in pieces
            ],
            more,
        )

    def _changed(self) -> dict[int, Any] | None:
        """Return the tokens of the short tape that grow, as they are with all blocks."""
        found: dict[int, Any] = {}
        for run, growth in enumerate(self.growths):
            for token, form in growth.changed.items():
                mine = self.base.forms[token]
                before = found.get(token, mine)
                grown = [
                    _grown(now, one, other, self._more(run), growth.more)
                    for now, one, other in zip(_sizes(before), _sizes(mine), _sizes(form), strict=True)
                ]
                if None in grown:
                    return None
                found[token] = _with_sizes(before, grown)
        return found

    def _units(self) -> Iterator[UnitFacts]:
        """Yield the units, in the order of the model."""
        waiting: list[tuple[int, str, UnitFacts]] = []
        for unit in self.base.found.units:
            place = self.short.place(unit.name)
            if isinstance(place, str):
                yield from self._further(waiting)
                waiting = []
                yield attrs.evolve(unit, name=place)
                continue
            run, number, inner = place
            if number != SHORT // 2 - 1 or (waiting and waiting[0][0] != run):
                yield from self._further(waiting)
                waiting = []
            if number == SHORT // 2 - 1:
                waiting.append((run, inner, unit))
            name = self._name_of((run, number))
            yield attrs.evolve(unit, name=f"{name}.{inner}" if inner else name)
        yield from self._further(waiting)

    def _further(self, units: Sequence[tuple[int, str, UnitFacts]]) -> Iterator[UnitFacts]:
        """Yield the units of the blocks that were left out, which are those of the block before."""
        if not units:
            return
        run = units[0][0]
        for number in range(SHORT // 2, SHORT // 2 + self._more(run)):
            for _, inner, unit in units:
                name = self._named(run, number)
                yield attrs.evolve(unit, name=f"{name}.{inner}" if inner else name)


def _pieces(insertion: Insertion, written: Written) -> Iterator[tuple[array[int], Any, Any]]:
    """Yield the tokens of an insertion, kernels that follow each other as one."""
    tokens = zip(insertion.forms, insertion.blocks, strict=True)
    for are_kernels, group in itertools.groupby(tokens, lambda token: token[0][0] == "kernel"):
        if are_kernels:
            yield array("l", [written.number_of(form[1]) for form, _ in group]), None, None
        else:
            yield from ((array("l"), form, block) for form, block in group)


def _grown(now: int, one: int, other: int, more: int, step: int) -> int | None:
    difference = (other - one) * more
    return None if difference % step else now + difference // step


def _sizes(form: Any) -> tuple[int, ...]:
    """Return the numbers in a token that may grow."""
    if form[0] == "kernel":
        return (form[1].flops, form[1].nbytes)
    if form[0] == "entry":
        asked = form[1][4]
        return (form[1][3], 0 if asked is None else asked[1])
    return (form[1],)


def _with_sizes(form: Any, sizes: Sequence[Any]) -> Any:
    if form[0] == "kernel":
        return ("kernel", attrs.evolve(form[1], flops=sizes[0], nbytes=sizes[1]))
    if form[0] == "entry":
        what, stage, step, _, asked = form[1]
        asked = None if asked is None else (asked[0], sizes[1], asked[2])
        return ("entry", (what, stage, step, sizes[0], asked), *form[2:])
    return (form[0], sizes[0], *form[2:])


# The costs of many equal blocks, from those of few


Peaks: TypeAlias = "tuple[int, list[dict[str, int]]]"
"""The most bytes at once until the model is wrapped, and in the stages of each step."""


def _grown_costs(
    base: Costs, longer: Sequence[Costs], blocks: Sequence[tuple[int, int]], laid_out: Peaks
) -> Costs | None:
    """Return the costs of all blocks: peaks are those that were laid out, and the rest grows with the blocks.

    Args:
        base: the costs of few blocks of each run.
        longer: for each run, the costs of some more of its blocks.
        blocks: for each run, how many blocks `base` lacks, and how many more of them `longer` has.

    Returns:
        `None` if a number does not grow with the blocks.
    """
    all_facts = [dict(each.facts()) for each in longer]
    facts: dict[str, int] = {}
    for name, value in base.facts():
        for more, (lacking, step) in zip(all_facts, blocks, strict=True):
            difference = (more.get(name, 0) - dict(base.facts())[name]) * lacking
            if not name.startswith("peak") and difference % step:
                return None
            value += difference // step
        facts[name] = value
    building, peaks_of_steps = laid_out

    def resting(what: str) -> dict[str, int]:
        return {dtype: facts[f"{what} in {dtype}"] for dtype in getattr(base.resting, what)}

    steps = [
        StepCosts(
            peaks_of_steps[number],
            {
                op: Totals(*(facts[f"{op} {what} in step {number + 1}"] for what in ("calls", "bytes", "bytes sent")))
                for op in step.collectives
            },
        )
        for number, step in enumerate(base.steps)
    ]
    return Costs(
        Resting(resting("parameters"), resting("gradients"), resting("states")),
        building,
        tuple(steps),
        facts["left after the last step"],
    )


def peaks(entries: Sequence[Entry], log: Log, stop: int) -> Peaks:
    """Return the most bytes at once until the model is wrapped, and in the stages of each step."""
    stages = [entry for entry in entries if entry.kind == "stage"]
    ends = [*(entry.place for entry in stages[1:]), stop]
    building = 0
    steps: dict[int, dict[str, int]] = {}
    for entry, end in zip(stages, ends, strict=True):
        peak = log.peak(entry.place, end)
        if entry.stage in STAGES:
            of_step = steps.setdefault(entry.step, {})
            of_step[entry.stage] = max(of_step.get(entry.stage, 0), peak)
        elif entry.stage != "zero_grad":
            building = max(building, peak)
    return building, [steps[number] for number in sorted(steps)]


def _peaks_of(costs: Costs) -> Peaks:
    """Return the same numbers, of costs."""
    return costs.building, [dict(step.peaks) for step in costs.steps]
