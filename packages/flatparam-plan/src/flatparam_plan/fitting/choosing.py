"""The fastest way to train a program within a budget of memory: by a profile, or measured on this machine."""

from __future__ import annotations

import attrs

from flatparam_plan.fitting.explaining import choices_of, way_of
from flatparam_plan.fitting.fitted import Fitted
from flatparam_plan.fitting.planner import Planner
from flatparam_plan.fitting.search import Search
from flatparam_plan.hardware import AnyProfile, Profile, profile_named, timed_here, transport_here
from flatparam_plan.here import predicted_here, profile_here, setup_here
from flatparam_plan.training import PlanError, Setup, TrainingProgram
from flatparam_plan.units import with_blocks

__all__ = ["fit"]


def fit(
    program: TrainingProgram,
    setup: Setup,
    *,
    memory: int,
    profile: AnyProfile,
    only_units: bool = False,
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

    Raises:
        PlanError: if no way fits; the message says how much the smallest takes. Also if this machine cannot run it.
    """
    transport = transport_here(profile)
    if transport is None:
        return _fitted(_searched(program, setup, memory, profile_named(profile), only_units))
    setup = setup_here(setup, transport)
    [timings] = timed_here([(program, with_blocks(program, setup))])
    search = _searched(program, setup, memory, profile_here(timings, setup), only_units)
    _measure(search)
    return _fitted(search)


def _searched(
    program: TrainingProgram, setup: Setup, memory: int, profile: Profile, only_units: bool
) -> Search:
    search = Search(setup, memory, Planner(program, profile), only_units)
    search.run()
    if search.best.peak.nbytes > memory:
        raise PlanError(
            f"expected a way to train with a peak of at most {memory:,} bytes on each rank, found that the smallest, "
            f"{way_of(search.best.setup)}, takes {search.best.peak.nbytes:,}; take more ranks, a smaller batch, "
            f"smaller units, {'recomputed activations, ' if only_units else ''}or offload the shards"
        )
    return search


def _measure(search: Search) -> None:
    """Replace the predictions of the best plan and of the first by measured ones, and leave only these if need be."""
    best, plain = search.best, search.plans[0]
    chosen = [plain] if best is plain else [plain, best]
    predictions = predicted_here(search.planner.program, [plan.rehearsal for plan in chosen])
    for plan, prediction in zip(chosen, predictions, strict=True):
        measured = attrs.evolve(plan, prediction=prediction)
        search.plans[search.plans.index(plan)] = measured
        search.before[id(measured)] = search.before.get(id(plan), measured)


def _fitted(search: Search) -> Fitted:
    """The plans that were found, the best first: among measured plans, if there are any."""
    plain, memory = search.plans[0], search.memory

    order = sorted(search.plans, key=search.rank)
    measured = [plan for plan in order if plan.prediction is not None and plan.prediction.is_measured]
    best = next(iter(measured), order[0])
    others = [plan for plan in order if plan is not best]
    before = search.before.get(id(best), best)
    return Fitted(memory, (best, *others), plain, choices_of(best, before, plain, memory))
