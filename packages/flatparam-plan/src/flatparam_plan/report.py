"""The plan of a program: what it will cost, unit by unit, where its peak is, and what it sends over which links."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import attrs

from flatparam_files.command import shown_nbytes
from flatparam_plan.costs import Costs
from flatparam_plan.picture import columns, shown_flops
from flatparam_plan.rehearsal import Rehearsal, UnitFacts
from flatparam_plan.training import Setup

if TYPE_CHECKING:
    from flatparam_plan.timeline import Prediction


@final
@attrs.frozen
class Peak:
    """The moment at which most memory is in use."""

    nbytes: int
    stage: str
    step: int
    unit: str
    """The unit that computes then."""
    uses: Mapping[str, int]
    """The bytes in use then, by what they are for."""


@final
@attrs.frozen
class UnitCosts:
    """The bytes that a unit holds, and its work in a step."""

    facts: UnitFacts
    gathers: int
    reductions: int
    sent_nbytes: int
    """The bytes that this rank sends for it in a step."""
    activation_nbytes: int
    """The bytes that it makes in the forward pass and that stay for the backward pass."""
    flops: int
    """The floating-point operations of a step, forward and backward."""


@final
@attrs.frozen(eq=False)
class Plan:
    """The predicted costs of a training program for each rank. Every number of bytes and of collectives is exact.

    `costs` is what `flatparam_plan.costs.measure` returns of the same program when it runs, on the CPU.
    """

    setup: Setup
    costs: Costs
    units: tuple[UnitCosts, ...]
    peak: Peak
    links: Mapping[str, int]
    """The bytes that a host's ranks send in a step, within the host and to other hosts, if collectives go in rings."""
    flops: int
    """The floating-point operations of a rank in a step."""
    activation_nbytes: int
    unmeasured: tuple[str, ...]
    """Kernels that may take memory of their own that is not counted, since they are too large to be tried."""
    rehearsal: Rehearsal = attrs.field(repr=False)
    prediction: Prediction | None = None
    """The time of a step, if a hardware profile was given."""

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(unit.facts.numel for unit in self.units)

    @property
    def notes(self) -> tuple[str, ...]:
        """How the program is trained, other than the model says."""
        return self.rehearsal.notes

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the plan as text, for people."""
        lines = [self._title(), ""]
        lines += _resting(self.costs)
        lines += ["", *_units(self.units), "", *self._peak(), "", *self._sent()]
        if self.notes:
            lines += ["", *self.notes]
        if self.unmeasured:
            lines += ["", f"not counted: what {', '.join(self.unmeasured)} take inside, if anything"]
        if self.prediction is not None:
            lines += ["", *self.prediction.lines()]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the plan as one JSON object."""
        return json.dumps(self.facts(), indent=1)

    def facts(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        found: dict[str, Any] = {
            "setup": {
                name: value if isinstance(value, (int, float, str, type(None))) else str(value)
                for name, value in attrs.asdict(self.setup, recurse=False).items()
            },
            "parameters": self.numel,
            "costs": attrs.asdict(self.costs),
            "peak": attrs.asdict(self.peak),
            "units": [attrs.asdict(unit) for unit in self.units],
            "links": dict(self.links),
            "flops": self.flops,
            "activation_nbytes": self.activation_nbytes,
            "unmeasured": list(self.unmeasured),
            "notes": list(self.notes),
        }
        if self.prediction is not None:
            found["prediction"] = self.prediction.facts()
        return found

    def _title(self) -> str:
        setup = self.setup
        hosts = -(-setup.world_size // setup.ranks_per_host)
        kind = self.units[0].facts.kind if self.units else "model"
        units = len(self.units)
        return (
            f"{kind}: {self.numel:,} parameters in {units} unit{'s' * (units != 1)}, {setup.strategy}, on "
            f"{setup.world_size} "
            f"rank{'s' * (setup.world_size > 1)} of {hosts} host{'s' * (hosts > 1)}"
        )

    def _peak(self) -> list[str]:
        peak = self.peak
        where = f" of {peak.unit}" if peak.unit else ""
        lines = [f"peak {shown_nbytes(peak.nbytes)}, in the {peak.stage}{where}, step {peak.step + 1}"]
        ordered = sorted(peak.uses.items(), key=lambda item: -item[1])
        return lines + columns([[f"  {name}", shown_nbytes(nbytes), f"{nbytes:,}"] for name, nbytes in ordered])

    def _sent(self) -> list[str]:
        step = self.costs.steps[-1]
        rows = [["each step", "collectives", "sent by a rank", "bytes"]]
        for op, totals in step.collectives.items():
            sent = totals.sent_nbytes
            rows.append([f"  {op}", f"{totals.count}", shown_nbytes(sent), f"{sent:,}"])
        lines = columns(rows)
        links = ", ".join(f"{shown_nbytes(nbytes)} {where}" for where, nbytes in self.links.items())
        return [*lines, f"links: the ranks of a host send {links}; {shown_flops(self.flops)} on each rank"]


def _resting(costs: Costs) -> list[str]:
    rows = [["at rest", "", "bytes"]]
    for what in ("parameters", "gradients", "states"):
        name = {"states": "optimizer's states"}.get(what, what)
        for dtype, nbytes in getattr(costs.resting, what).items():
            rows.append([f"  {name}, {dtype}", shown_nbytes(nbytes), f"{nbytes:,}"])
    return columns(rows)


def _units(units: Sequence[UnitCosts]) -> list[str]:
    """Return a line for each run of equal units."""
    rows = [["units", "class", "parameters", "full", "shard", "padding", "gathers", "sent", "activations"]]
    groups: list[list[UnitCosts]] = []
    for unit in units:
        if groups and _same(groups[-1][0]) == _same(unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    for group in groups:
        first, facts = group[0], group[0].facts
        name = facts.name if len(group) == 1 else f"{facts.name} ... {group[-1].facts.name} ({len(group)})"
        sizes = (facts.full_nbytes, facts.shard_nbytes, facts.padding_nbytes)
        rows.append(
            [
                f"  {name}",
                facts.kind,
                f"{facts.numel:,}",
                *map(shown_nbytes, sizes),
                str(first.gathers),
                shown_nbytes(first.sent_nbytes),
                shown_nbytes(first.activation_nbytes),
            ]
        )
    return columns(rows)


def _same(unit: UnitCosts) -> UnitCosts:
    return attrs.evolve(unit, facts=attrs.evolve(unit.facts, name=""))
