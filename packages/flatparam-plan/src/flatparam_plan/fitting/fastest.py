"""The fastest way to train a program within a budget of memory: by a profile, or measured on this machine.

A policy that plans asks for the units of a model that is about to be wrapped.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, final

import attrs
from torch import Tensor, nn

from flatparam.resolving.arguments import Environment
from flatparam_comm import Topology
from flatparam_plan.fitting.fitted import Fitted, choices_of, seconds_of, way_of
from flatparam_plan.fitting.replayed import Keeping, Replay
from flatparam_plan.hardware.profile import AnyProfile, Profile, device_of, profile_named, transport_here
from flatparam_plan.hardware.samples import timed_here
from flatparam_plan.here import predicted_here, profile_here, setup_here
from flatparam_plan.hollow.blank import hollow_copy
from flatparam_plan.named_units import NamedUnits, Outline, with_blocks
from flatparam_plan.plan_error import PlanError
from flatparam_plan.planner import Planner
from flatparam_plan.report import Plan
from flatparam_plan.training import STRATEGIES, Setup, TrainingProgram


def fit(
    program: TrainingProgram,
    setup: Setup,
    *,
    memory: int,
    profile: AnyProfile,
    only_units: bool = False,
    observe: Callable[[int], object] = lambda count: None,
) -> Fitted:
    """Choose the units of `program` and what they do, for the least predicted time with a peak of at most `memory`.

    Chosen are the modules that are units, whether each frees its parameters after the forward pass, how far ahead units
    are gathered, the blocks whose activations are recomputed, and the strategy. The search lays rehearsed steps out
    anew, and what it chooses is rehearsed. Each block as a unit with FULL_SHARD is always among the ways, so the choice
    is never predicted to be slower than that, if that fits.

    On this machine the ranks run steps with each block as a unit, from which the numbers of a profile follow. In the
    end they run steps of the choice and of each block as a unit, in turn, and the faster of the two is chosen.

    Args:
        setup: what is not varied. If it says how to wrap, those units are the blocks.
        memory: the most bytes that a rank may have in use at once.
        profile: the hardware, for the time of a step: a profile, the name of one, or "this-machine".
        only_units: leave the strategy and the activations as they are.
        observe: called with 1 after each plan.

    Raises:
        PlanError: if no way fits; the message says how much the smallest takes. Also if this machine cannot run it.
    """
    transport = transport_here(profile)
    if transport is None:
        return _fitted(_searched(program, setup, memory, profile_named(profile), only_units, observe))
    setup = setup_here(setup, transport)
    [timings] = timed_here([(program, with_blocks(program, setup))])
    search = _searched(program, setup, memory, profile_here(timings, setup), only_units, observe)
    _measure(search)
    return _fitted(search)


def _searched(
    program: TrainingProgram,
    setup: Setup,
    memory: int,
    profile: Profile,
    only_units: bool,
    observe: Callable[[int], object],
) -> _Search:
    search = _Search(setup, memory, Planner(program, profile), only_units, observe)
    search.run()
    if search.best.peak.nbytes > memory:
        raise PlanError(
            f"expected a way to train with a peak of at most {memory:,} bytes on each rank, found that the smallest, "
            f"{way_of(search.best.setup)}, takes {search.best.peak.nbytes:,}; take more ranks, a smaller batch, "
            f"smaller units, {'recomputed activations, ' if only_units else ''}or offload the shards"
        )
    return search


def _measure(search: _Search) -> None:
    """Replace the predictions of the best plan and of the first by measured ones, and leave only these if need be."""
    best, plain = search.best, search.plans[0]
    chosen = [plain] if best is plain else [plain, best]
    predictions = predicted_here(search.planner.program, [plan.rehearsal for plan in chosen])
    for plan, prediction in zip(chosen, predictions, strict=True):
        measured = attrs.evolve(plan, prediction=prediction)
        search.plans[search.plans.index(plan)] = measured
        search.before[id(measured)] = search.before.get(id(plan), measured)


def _fitted(search: _Search) -> Fitted:
    """Return the plans that were found, the best first: among measured plans, if there are any."""
    plain, memory = search.plans[0], search.memory

    order = sorted(search.plans, key=search.rank)
    measured = [plan for plan in order if plan.prediction is not None and plan.prediction.is_measured]
    best = next(iter(measured), order[0])
    others = [plan for plan in order if plan is not best]
    before = search.before.get(id(best), best)
    return Fitted(memory, (best, *others), plain, choices_of(best, before, plain, memory))


# The fastest way to train a program within a budget of memory: its units, and what each of them does


_LOGGER = logging.getLogger("flatparam.plan")
_FREEING: Final = {"full": "full", "grad_op": "full", "no_shard": "no_shard"}
_STAYING: Final = {"full": "grad_op", "hybrid": "hybrid_grad_op"}
_TRIES: Final = 3
"""How often a choice is made again with less memory, if a rehearsal takes more than its replay."""
_FEW: Final = 100
"""The most units of a choice that is rehearsed with all its blocks in the end, if few of them were before."""
_NOTICED: Final = 0.1
"""The part of a step that communication must take for it to be worth a try to recompute activations for."""


@final
@attrs.define(eq=False)
class _Search:
    """A search, and what was rehearsed so far."""

    setup: Setup
    memory: int
    planner: Planner
    only_units: bool
    observe: Callable[[int], object]
    plans: list[Plan] = attrs.field(factory=list)
    """Every plan, in the order in which they were made: the first has each block as a unit with FULL_SHARD."""
    before: dict[int, Plan] = attrs.field(factory=dict)
    """For a plan that keeps units, by its id, the same one without."""

    def rank(self, plan: Plan) -> tuple[bool, float, int]:
        """Return the order of plans: those that fit by their time, and then the others by their peak."""
        peak = plan.peak.nbytes
        return (peak > self.memory, peak if peak > self.memory else seconds_of(plan), peak)

    @property
    def best(self) -> Plan:
        """The best plan so far."""
        return min(self.plans, key=self.rank)

    def run(self) -> None:
        """Rehearse what is worth it."""
        with with_little_to_collect() as self.planner.has_planned:
            self._run()

    def _run(self) -> None:
        outline = self.planner.begin()
        self._search(outline)
        if not self._is_confirmed(self.best):
            _LOGGER.info("the blocks do not all do the same: all are rehearsed")
            self.planner.template = None
            self.plans.clear()
            self._search(outline)

    def _is_confirmed(self, plan: Plan) -> bool:
        """Return whether a rehearsal of all blocks says the same, if there are few enough for that."""
        if not plan.rehearsal.is_laid_out or len(plan.units) > _FEW:
            return True
        whole = self.planner.whole(plan.setup)
        return whole.costs == plan.costs and seconds_of(whole) == seconds_of(plan)

    def _search(self, outline: Outline) -> None:
        for strategy in self._strategies():
            self._structures(attrs.evolve(self.setup, strategy=strategy), outline)
        self._keep()
        self._accumulate()
        self._prefetch()

    def _accumulate(self) -> None:
        """Rehearse the best plan with all units gathered between micro-batches, too, as only whole strategies do it."""
        best = self.best
        name, colon, number = best.setup.strategy.partition(":")
        if self.only_units or self.setup.accumulate == 1 or name not in _STAYING:
            return
        wrap = NamedUnits(dict.fromkeys(_names(best), False))
        plan = self._plan(attrs.evolve(best.setup, strategy=_STAYING[name] + colon + number, wrap=wrap))
        self.before[id(plan)] = self.before.get(id(best), best)

    def _strategies(self) -> list[str]:
        """Return the strategies that free their parameters: what is kept is chosen for each unit."""
        name, colon, number = self.setup.strategy.partition(":")
        found = [_FREEING.get(name, "hybrid") + colon + number]
        size = self.setup.ranks_per_host
        several = self.setup.world_size > size and self.setup.world_size % size == 0
        if not self.only_units:
            found = ["full", *found, *([f"hybrid:{size}"] if several else [])]
        return list(dict.fromkeys(found))

    def _structures(self, setup: Setup, outline: Outline) -> None:
        """Rehearse each block as a unit; with more units; and, if need be, with smaller ones and recomputation."""
        if setup.wrap is None:
            setup = attrs.evolve(setup, wrap=NamedUnits(dict.fromkeys(outline.blocks, True)))
        plain = self._plan(setup)
        blocks = _names(plain)
        rest = [name for name in outline.rest if not any(_touch(name, block) for block in blocks)]
        found = [plain, *self._with_units(plain, [*blocks, *rest])]
        smallest = min(found, key=lambda plan: plan.peak.nbytes)
        recomputes = not (self.only_units or setup.checkpointing) and bool(blocks)
        if smallest.peak.nbytes <= self.memory:
            if recomputes:
                self._recompute(min(found, key=self.rank), blocks)
            return
        parts = [name for name in outline.parts if any(_is_inside(name, block) for block in blocks)]
        whole = [block for block in blocks if not any(_is_inside(name, block) for name in parts)]
        others = [name for name in _names(smallest) if name not in blocks]
        smaller = self._with_units(smallest, [*parts, *whole, *others])
        for plan in [smallest, *smaller] if recomputes else []:
            if self._recompute(plan, blocks):
                return

    def _with_units(self, before: Plan, names: list[str]) -> list[Plan]:
        """Return the plan with units of these names, if all are called and the program runs with them."""
        if set(names) == set(_names(before)):
            return []
        setup = attrs.evolve(before.setup, wrap=NamedUnits(dict.fromkeys(names, True)))
        try:
            plan = self.planner.plan(setup)
        except Exception as error:
            # Mostly the program uses a parameter of a module outside of its forward pass; whatever it raises, it cannot
            # be trained so.
            _LOGGER.info("left out: units %s, with which the program raises %r", ", ".join(names), error)
            return []
        called = {each.unit for each in plan.rehearsal.entries if each.kind in ("kernels", "unshard")}
        if not set(names) <= called:
            return self._with_units(before, [name for name in names if name in called])
        self.plans.append(plan)
        return [plan]

    def _recompute(self, before: Plan, blocks: list[str]) -> bool:
        """Rehearse with the activations of all blocks recomputed, and of as few of the first as fit; whether one fits.

        The activations of the first blocks wait longest.
        """
        prediction = before.prediction
        excess = before.peak.nbytes - self.memory
        if excess <= 0 and prediction and prediction.exposed < _NOTICED * prediction.seconds:
            return True
        every = self._plan(attrs.evolve(before.setup, checkpointing=tuple(blocks)))
        if excess <= 0 or every.peak.nbytes > self.memory:
            return every.peak.nbytes <= self.memory
        saved = (before.peak.nbytes - every.peak.nbytes) / len(blocks)
        for _ in range(_TRIES):
            count = math.ceil(excess / saved)
            if count >= len(blocks):
                break
            plan = self._plan(attrs.evolve(before.setup, checkpointing=tuple(blocks[:count])))
            if plan.peak.nbytes <= self.memory:
                break
            excess += plan.peak.nbytes - self.memory
        return True

    def _keep(self) -> None:
        """Rehearse what the replays choose to keep, the most promising first, until no other can be better."""
        promising = []
        for plan in list(self.plans):
            if plan.peak.nbytes <= self.memory:
                replay = Replay(plan.rehearsal, self.planner.profile)
                keeping = replay.best(self.memory)
                if keeping is not None and keeping.names:
                    promising.append((keeping, replay, plan))
        for keeping, replay, plan in sorted(promising, key=lambda each: each[0].seconds):
            if keeping.seconds < seconds_of(self.best):
                self._kept(keeping, replay, plan)

    def _kept(self, keeping: Keeping | None, replay: Replay, before: Plan) -> None:
        budget = self.memory
        for _ in range(_TRIES):
            if keeping is None or not keeping.names:
                return
            wrap = NamedUnits({name: name not in keeping.names for name in _names(before)})
            plan = self._plan(attrs.evolve(before.setup, wrap=wrap))
            self.before[id(plan)] = before
            if plan.peak.nbytes <= self.memory:
                return
            budget -= plan.peak.nbytes - self.memory
            keeping = replay.best(budget)

    def _prefetch(self) -> None:
        """Rehearse the best plan with one more unit gathered ahead than the device does by itself."""
        best = self.best
        if self.rank(best)[0] or best.setup.forward_prefetch:
            return
        depth = 2 if best.setup.device == "accelerator" else 1
        frees = {unit.facts.name: unit.facts.frees_after_forward for unit in best.units[1:]}
        plan = self._plan(attrs.evolve(best.setup, wrap=NamedUnits(frees, depth)))
        self.before[id(plan)] = self.before.get(id(best), best)

    def _plan(self, setup: Setup) -> Plan:
        plan = self.planner.plan(setup)
        self.plans.append(plan)
        self.observe(1)
        return plan


def _names(plan: Plan) -> list[str]:
    """Return the names of the units, without the root."""
    return [unit.facts.name for unit in plan.units[1:]]


def _is_inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


def _touch(name: str, other: str) -> bool:
    return name == other or _is_inside(name, other) or _is_inside(other, name)


# Python's collector of cycles, out of the way


@contextmanager
def with_little_to_collect() -> Iterator[Callable[[], None]]:
    """Inside, the collector of cycles looks at new objects alone; what is given is called to count all as old."""
    if gc.get_freeze_count():
        # Somebody else has frozen objects, which are not ours to thaw.
        yield lambda: None
        return
    gc.freeze()
    try:
        yield gc.freeze
    finally:
        gc.unfreeze()


_RANKS_PER_HOST = 8
_PREFETCHES = {None: "none", "BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}


class Asked(Protocol):
    """The arguments of `flatparam.wrap.planned`."""

    memory: int
    profile: AnyProfile
    inputs: Any
    batch: int
    sequence: int
    loss: Callable[[Any], Tensor] | None
    ranks_per_host: int | None
    settings: dict[str, Any]


def answer(asked: Asked, model: nn.Module, topology: Topology, kwargs: dict[str, Any]) -> Any:
    """Return the units, the prefetch depth and the choices; or why there are none, which every rank is to say."""
    try:
        program = TrainingProgram.of(
            functools.partial(hollow_copy, model),
            asked.inputs,
            batch=asked.batch,
            sequence=asked.sequence,
            loss=asked.loss,
        )
        program = attrs.evolve(program, template=model, copies=hollow_copy)
        setup = _setup(asked, topology, kwargs)
        fitted = fit(program, setup, memory=asked.memory, profile=asked.profile, only_units=True)
    except Exception as error:
        # Whatever it is, the other ranks wait for an answer.
        return str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
    frees = {unit.facts.name: unit.facts.frees_after_forward for unit in fitted.best.units[1:]}
    return frees, fitted.best.setup.wrap.forward_prefetch, fitted.choices


def _setup(asked: Asked, topology: Topology, kwargs: dict[str, Any]) -> Setup:
    strategy = next(name for name, each in STRATEGIES.items() if each is kwargs["sharding_strategy"])
    mixed, offload, backward = (kwargs[name] for name in ("mixed_precision", "cpu_offload", "backward_prefetch"))
    dtypes = ("param_dtype", "reduce_dtype", "buffer_dtype")
    settings: dict[str, Any] = {name: getattr(mixed, name, None) for name in dtypes}
    return Setup(
        world_size=topology.data_parallel_size,
        ranks_per_host=asked.ranks_per_host or Environment.read().nodes_of or _RANKS_PER_HOST,
        strategy=f"{strategy}:{topology.shard.size}" if strategy.startswith("hybrid") else strategy,
        cpu_offload=bool(getattr(offload, "offload_params", False)),
        use_orig_params=bool(kwargs["use_orig_params"]),
        forward_prefetch=int(kwargs["forward_prefetch"]),
        backward_prefetch=_PREFETCHES[getattr(backward, "name", None)],
        device=device_of(asked.profile),
        **settings,
        **asked.settings,
    )
