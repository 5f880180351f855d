"""From programs to their plans: one in one setup, by a rehearsal, and one in many, from few of its blocks."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import attrs
from torch import Tensor, nn

from flatparam_comm import sent_nbytes
from flatparam_plan.hardware.profile import Profile
from flatparam_plan.named_units import Outline, outline_of
from flatparam_plan.rehearsal import Rehearsal, UnitFacts, rehearse
from flatparam_plan.repeated.extension import rehearse_repeated
from flatparam_plan.repeated.repeats import Template
from flatparam_plan.report import Peak, Plan, UnitCosts
from flatparam_plan.training import Call, Inputs, Setup, TrainingProgram

if TYPE_CHECKING:
    from flatparam_plan.timeline import Prediction

_NAMES = {
    "forward": "activations",
    "backward": "gradients under way",
    "clipping": "temporaries of clipping",
    "optimizer": "temporaries of the optimizer",
    "building": "inputs",
    "wrapping": "left by wrapping",
}
"""The names, by stage, of memory that the stage made and that does not stay."""


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
    """Predict the cost of training `model` for each rank, before it runs: nothing is allocated, computed or sent.

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
        profile: a hardware profile, or the name of one, to predict the time of a step; "this-machine" or
            "this-machine:gloo" starts the ranks here for some seconds and measures their steps.
        settings: see `Setup`: `world_size`, `ranks_per_host`, `strategy`, `wrap`, `param_dtype`, `reduce_dtype`,
            `optimizer`, `cpu_offload`, `checkpointing`, `use_orig_params`, `accumulate`, `max_norm`, ...

    Raises:
        PlanError: if the setup is not possible, or the program's shapes depend on what it computes.
    """
    program = TrainingProgram.of(model, inputs, batch=batch, sequence=sequence, loss=loss)
    return plan_of(program, Setup(**settings), steps=steps, profile=profile)


def plan_of(program: TrainingProgram, setup: Setup, *, steps: int = 2, profile: Any = None) -> Plan:
    """Return the plan of `program` under `setup`; see `plan`."""
    return plans_of(program, [setup], steps=steps, profile=profile)[0]


def plans_of(
    program: TrainingProgram,
    setups: Sequence[Setup],
    *,
    steps: int = 2,
    profile: Any = None,
    observe: Callable[[int], object] = lambda count: None,
) -> list[Plan]:
    """Return the plans of `program` under several setups; see `plan`. What is measured on this machine is run in turn.

    Args:
        observe: called with 1 for each setup that is rehearsed.
    """

    def rehearsed(setup: Setup) -> Rehearsal:
        found = rehearse(program, setup, steps=steps)
        observe(1)
        return found

    if profile is not None:
        # What predicts the time is not needed without a profile.
        from flatparam_plan.hardware.profile import transport_here
        from flatparam_plan.here import predicted_here, setup_here

        transport = transport_here(profile)
        if transport is not None:
            here = [rehearsed(setup_here(each, transport)) for each in setups]
            return [plan_from(*each) for each in zip(here, predicted_here(program, here), strict=True)]
    return [plan_from(rehearsed(each), profile=profile) for each in setups]


def plan_from(found: Rehearsal, prediction: Prediction | None = None, *, profile: Any = None) -> Plan:
    """Return the plan of what was rehearsed, with its time under a profile, or as it is predicted already."""
    start, stop = _bounds(found, found.steps - 1)
    flops = _flops_by_unit(found, start, stop)
    activations = _activations(found)
    calls: dict[str, list[Call]] = {}
    for entry in found.entries[start:stop]:
        if entry.kind == "issued" and entry.call is not None:
            calls.setdefault(entry.call.label, []).append(entry.call)
    units = tuple(
        _unit_costs(each, calls.get(each.name, []), found.setup.rank, flops, activations) for each in found.units
    )
    if profile is not None:
        from flatparam_plan.timeline import predict

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
    """Return the entries of a step."""
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
    """Return the bytes that each unit made in the last forward pass and that were there at its end."""
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
    facts: UnitFacts, calls: Sequence[Call], rank: int, flops: Mapping[str, int], activations: Mapping[str, int]
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
    """Return the bytes that the ranks of this rank's host send in a step, in rings."""
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


# Plans of one program in many setups, from few of its blocks if they repeat


@final
@attrs.define(eq=False)
class Planner:
    """Makes plans of a program on some hardware."""

    program: TrainingProgram
    profile: Profile
    template: Template | None = None
    """The model on the meta device, if that is where the program makes it."""
    has_planned: Callable[[], None] = attrs.field(default=lambda: None, init=False)
    """Is called after each plan, which stays."""

    def begin(self) -> Outline:
        """Return the modules of the program's model. If their blocks repeat, few of them are rehearsed from now on."""
        outline, model = outline_of(self.program)
        self.template = None if model is None else Template(model)
        return outline

    def plan(self, setup: Setup) -> Plan:
        """Return the plan of the program, from few of its blocks if they repeat."""
        found = None
        if self.template is not None:
            found = rehearse_repeated(self.program, self.template, setup)
        if found is None:
            found = rehearse(self.program, setup)
        plan = plan_from(found, profile=self.profile)
        self.has_planned()
        return plan

    def whole(self, setup: Setup) -> Plan:
        """Return the plan of the program, from all of its blocks."""
        return plan_from(rehearse(self.program, setup), profile=self.profile)
