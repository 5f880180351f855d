"""The plan of a program: what it will cost, unit by unit, where its peak is, and what it sends over which links."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import attrs
from torch import Tensor, nn

from flatparam.observing.table import columns, shown_flops, shown_nbytes
from flatparam.planning.costs import Costs
from flatparam.planning.program import Inputs, TrainingProgram
from flatparam.planning.ranks import Call
from flatparam.planning.rehearsal import Rehearsal, UnitFacts, rehearse
from flatparam.planning.setup import Setup
from flatparam_comm import sent_nbytes

if TYPE_CHECKING:
    from flatparam.planning.timeline import Prediction

__all__ = ["Peak", "Plan", "UnitCosts", "plan", "plan_from", "plan_of"]

_NAMES = {
    "forward": "activations",
    "backward": "gradients under way",
    "clipping": "temporaries of clipping",
    "optimizer": "temporaries of the optimizer",
    "building": "inputs",
    "wrapping": "left by wrapping",
}
"""What memory is for that was made in a stage and is nothing that stays."""


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
    """What a unit holds, and what it does in a step."""

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
    """What a training program will cost each rank. Every number of bytes and of collectives is exact.

    `costs` is what `flatparam.planning.costs.measure` returns of the same program when it runs, on the CPU.
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

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The plan as text, for people."""
        lines = [self._title(), ""]
        lines += _resting(self.costs)
        lines += ["", *_units(self.units), "", *self._peak(), "", *self._sent()]
        if self.unmeasured:
            lines += ["", f"not counted: what {', '.join(self.unmeasured)} take inside, if anything"]
        if self.prediction is not None:
            lines += ["", *self.prediction.lines()]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as one JSON object."""
        return json.dumps(self.facts(), indent=1)

    def facts(self) -> dict[str, Any]:
        """The plan as plain values."""
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
        }
        if self.prediction is not None:
            found["prediction"] = self.prediction.facts()
        return found

    def _title(self) -> str:
        setup = self.setup
        hosts = -(-setup.world_size // setup.ranks_per_host)
        kind = self.units[0].facts.kind if self.units else "model"
        return (
            f"{kind}: {self.numel:,} parameters in {len(self.units)} units, {setup.strategy}, on {setup.world_size} "
            f"rank{'s' * (setup.world_size > 1)} of {hosts} host{'s' * (hosts > 1)}"
        )

    def _peak(self) -> list[str]:
        peak = self.peak
        where = f" of {peak.unit}" if peak.unit else ""
        lines = [f"peak {shown_nbytes(peak.nbytes)}, in the {peak.stage}{where}, step {peak.step + 1}"]
        ordered = sorted(peak.uses.items(), key=lambda item: -item[1])
        return lines + columns(
            [[f"  {name}", shown_nbytes(nbytes), f"{nbytes:,}"] for name, nbytes in ordered]
        )

    def _sent(self) -> list[str]:
        step = self.costs.steps[-1]
        rows = [["each step", "collectives", "sent by a rank", "bytes"]]
        for op, totals in step.collectives.items():
            sent = totals.sent_nbytes
            rows.append([f"  {op}", f"{totals.count}", shown_nbytes(sent), f"{sent:,}"])
        lines = columns(rows)
        links = ", ".join(f"{shown_nbytes(nbytes)} {where}" for where, nbytes in self.links.items())
        return [*lines, f"links: the ranks of a host send {links}; {shown_flops(self.flops)} on each rank"]


def plan(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Inputs | Callable[..., Inputs] | None = None,
    *,
    batch: int = 1,
    sequence: int = 128,
    loss: Callable[[Any], Tensor] | None = None,
    steps: int = 2,
    profile: Any = None,
    **settings: Any,
) -> Plan:
    """What training `model` will cost each rank, before it runs: nothing is allocated, computed or sent.

    The wrapper, the runtime and the optimizer are the real ones; they run a few steps on tensors without memory, as
    one rank of a world in which no other exists. So memory, bytes and numbers of collectives are exact.

    Args:
        model: a module, best on the meta device, which is not changed; or a function that makes one.
        inputs: what the model is called with, or a function of `(batch, sequence)` that makes it; by default token ids,
            and labels if the model takes any.
        batch: the rows of a micro-batch on a rank.
        sequence: the tokens of a row.
        loss: makes a scalar of what the model returns; by default its loss, or the sum of its first tensor.
        steps: the number of steps; the first is special, since it makes the optimizer's states.
        profile: a hardware profile, or the name of one, to predict the time of a step.
        settings: see `Setup`: `world_size`, `ranks_per_host`, `strategy`, `wrap`, `param_dtype`, `reduce_dtype`,
            `optimizer`, `cpu_offload`, `checkpointing`, `use_orig_params`, `accumulate`, `max_norm`, ...

    Raises:
        PlanError: if the setup is not possible, or the program's shapes depend on what it computes.
    """
    program = TrainingProgram.of(model, inputs, batch=batch, sequence=sequence, loss=loss)
    return plan_of(program, Setup(**settings), steps=steps, profile=profile)


def plan_of(program: TrainingProgram, setup: Setup, *, steps: int = 2, profile: Any = None) -> Plan:
    """The plan of `program` under `setup`; see `plan`."""
    return plan_from(rehearse(program, setup, steps=steps), profile=profile)


def plan_from(found: Rehearsal, *, profile: Any = None) -> Plan:
    """The plan of what was rehearsed."""
    start, stop = _bounds(found, found.steps - 1)
    flops = _flops_by_unit(found, start, stop)
    activations = _activations(found)
    calls: dict[str, list[Call]] = {}
    for entry in found.entries[start:stop]:
        if entry.kind == "issued" and entry.call is not None:
            calls.setdefault(entry.call.label, []).append(entry.call)
    units = tuple(
        _unit_costs(each, calls.get(each.name, []), found.setup.rank, flops, activations)
        for each in found.units
    )
    prediction = None
    if profile is not None:
        # The module of profiles is not needed without one.
        from flatparam.planning.timeline import predict

        prediction = predict(found, profile)
    return Plan(
        found.setup,
        found.costs,
        units,
        _peak_of(found),
        _links(found, start, stop),
        sum(flops.values()),
        sum(activations.values()),
        found.unmeasured,
        found,
        prediction,
    )


def _bounds(found: Rehearsal, step: int) -> tuple[int, int]:
    """The entries of a step."""
    inside = [
        number
        for number, entry in enumerate(found.entries)
        if entry.step == step and entry.stage not in ("building", "wrapping")
    ]
    return inside[0], inside[-1] + 1


def _flops_by_unit(found: Rehearsal, start: int, stop: int) -> dict[str, int]:
    flops: dict[str, int] = {}
    of_work = [work.flops for work in found.works]
    for entry in found.entries[start:stop]:
        if entry.kind == "kernels":
            done = sum(of_work[number] for number in found.kernels[entry.start : entry.stop])
            flops[entry.unit] = flops.get(entry.unit, 0) + done
    return flops


def _activations(found: Rehearsal) -> dict[str, int]:
    """The bytes that each unit made in the last forward pass and that were there at its end."""
    log = found.log
    last = [entry for entry in found.entries if entry.stage == "forward" and entry.step == found.steps - 1]
    begins = max(number for number, entry in enumerate(last) if entry.kind == "stage")
    last = last[begins:]
    first, end = last[0].place, last[-1].place
    alive: dict[int, int] = {}
    for place in range(first, end):
        change = log.changes[place]
        if change < 0:
            alive.pop(~change, None)
        elif log.tags[change] == "forward":
            alive[change] = place
    kernels = [entry for entry in last if entry.kind == "kernels"]
    ends = [entry.place for entry in kernels]
    found_of: dict[str, int] = {}
    for number, place in alive.items():
        at = min(bisect.bisect_right(ends, place), len(kernels) - 1)
        unit = kernels[at].unit if kernels else ""
        found_of[unit] = found_of.get(unit, 0) + log.nbytes[number]
    return found_of


def _unit_costs(
    facts: UnitFacts,
    calls: Sequence[Call],
    rank: int,
    flops: Mapping[str, int],
    activations: Mapping[str, int],
) -> UnitCosts:
    return UnitCosts(
        facts,
        sum(call.op == "all_gather" for call in calls),
        sum(call.op == "reduce_scatter" for call in calls),
        sum(_sent(call, rank) for call in calls),
        activations.get(facts.name, 0),
        flops.get(facts.name, 0),
    )


def _sent(call: Call, rank: int) -> int:
    members = call.members
    return sent_nbytes(call.op, call.nbytes, rank=members.index(rank), size=len(members))


def _peak_of(found: Rehearsal) -> Peak:
    start = next(e.place for e in found.entries if e.kind == "stage" and e.stage == "forward")
    place = found.log.place_of_peak(start, len(found.log))
    entry = found.entry_at(place)
    uses: dict[str, int] = {}
    for tag, nbytes in found.log.alive_at(place).items():
        name = _NAMES.get(tag, tag)
        uses[name] = uses.get(name, 0) + nbytes
    return Peak(found.log.sizes[place - 1], entry.stage, entry.step, entry.unit, uses)


def _links(found: Rehearsal, start: int, stop: int) -> dict[str, int]:
    """The bytes that the ranks of this rank's host send in a step, in rings."""
    setup = found.setup
    size = setup.ranks_per_host
    host = setup.rank // size
    on_host = min(size, setup.world_size - host * size)
    within = across = 0
    for entry in found.entries[start:stop]:
        call = entry.call
        if entry.kind != "issued" or call is None:
            continue
        here = [number for number, rank in enumerate(call.members) if rank // size == host]
        leaving = sum(call.members[(number + 1) % len(call.members)] // size != host for number in here)
        sent = _sent(call, setup.rank) * on_host
        across += sent * leaving // len(here)
        within += sent - sent * leaving // len(here)
    return {"within it": within, "to other hosts": across}


def _resting(costs: Costs) -> list[str]:
    rows = [["at rest", "", "bytes"]]
    for what in ("parameters", "gradients", "states"):
        name = {"states": "optimizer's states"}.get(what, what)
        for dtype, nbytes in getattr(costs.resting, what).items():
            rows.append([f"  {name}, {dtype}", shown_nbytes(nbytes), f"{nbytes:,}"])
    return columns(rows)


def _units(units: Sequence[UnitCosts]) -> list[str]:
    """A line for each run of equal units."""
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
