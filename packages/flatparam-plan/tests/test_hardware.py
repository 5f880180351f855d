"""How the time of a step is measured on a real rank, and laid out for more blocks than were measured."""

from typing import Any

import attrs
import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam import PlanError
from flatparam_comm import Collectives, SingleCollectives, Topology, run_threads
from flatparam_plan import here
from flatparam_plan.hardware.profile import device_of, transport_here
from flatparam_plan.hardware.samples import ROUGH, Sample
from flatparam_plan.hardware.stretches import Clock, ClockedCollectives, Lap, Stretches, Timings
from flatparam_plan.rehearsal import Rehearsal, rehearse
from flatparam_plan.timeline import predict
from flatparam_plan.training import Setup, TrainingProgram

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """A unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """Tokens to scores, with more blocks than a sample has."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


SETUP = Setup(world_size=2, wrap=("Block",), optimizer="none")


def program(depth: int = 6) -> TrainingProgram:
    """The program that trains the model."""
    return TrainingProgram.of(lambda: Model(depth), batch=2, sequence=4)


@pytest.fixture(scope="module")
def rehearsed() -> Rehearsal:
    """A rehearsal of six blocks."""
    return rehearse(program(), SETUP)


def laps_of(stretches: Stretches, *, span: float, call: float) -> list[Lap]:
    """The laps of a step in which every stretch takes `span`, and every collective `call`, in seconds."""
    kinds = [entry.kind for entry in stretches.step if entry.kind in ("stage", "issued", "waited")]
    laps, now = [], 100.0
    for number, kind in enumerate([*kinds, "stage"]):
        now += span if number else 0.0
        end = now + (0.0 if kind == "stage" else call)
        laps.append(Lap(kind, now, end))
        now = end
    return laps


def test_a_clock_notes_stages_in_their_order() -> None:
    """A stage is an instant, which is noted when it begins."""
    clock = Clock()
    with clock.stage("forward", 0):
        clock.note("issued", 1.0)
    assert [lap.kind for lap in clock.laps] == ["stage", "issued"]
    stage, issued = clock.laps
    assert stage.begin == stage.end
    assert issued.begin == 1.0 < issued.end


def test_clocked_collectives_do_what_those_inside_do() -> None:
    """Each operation gives the same numbers, and is noted once when it is issued and once when it is waited for."""

    def rank(world: Collectives) -> tuple[list[list[float]], list[str]]:
        clock = Clock()
        group = ClockedCollectives(world, clock)
        mine = torch.tensor([1.0 + world.rank])
        full, part, whole = torch.zeros(2), torch.zeros(1), mine.clone()
        pending = group.all_gather(full, mine)
        pending.wait()
        pending.wait()
        assert pending.done()
        group.reduce_scatter(part, full).wait()
        group.all_reduce(whole).wait()
        group.broadcast(mine, root=1).wait()
        return [each.tolist() for each in (full, part, whole, mine)], [lap.kind for lap in clock.laps]

    for number, (values, kinds) in enumerate(run_threads(2, rank)):
        assert values == [[1.0, 2.0], [2.0, 4.0][number : number + 1], [3.0], [2.0]]
        assert kinds == ["issued", "waited"] * 4


def test_clocked_collectives_take_parts_only_if_those_inside_do() -> None:
    """A group that takes no parts does not seem to."""
    assert not hasattr(ClockedCollectives(SingleCollectives(), Clock()), "reduce_scatter_parts")


def test_a_subgroup_is_clocked_too() -> None:
    """What is made of clocked collectives tells the same clock."""

    def rank(world: Collectives) -> bool:
        clock = Clock()
        made = ClockedCollectives(world, clock).subgroup([0, 1])
        return isinstance(made, ClockedCollectives) and made.clock is clock

    assert run_threads(2, rank) == [True, True]


def test_what_was_measured_is_laid_out_again(rehearsed: Rehearsal) -> None:
    """The entries of a step take as long as its laps, each collective as long as it took, and no time twice."""
    stretches = Stretches.of(rehearsed, ROUGH)
    laps = laps_of(stretches, span=3.0, call=0.5)
    laid = stretches.laid(stretches.timed([laps, laps]))
    assert sum(laid) == pytest.approx(laps[-1].end - laps[0].begin)
    marks = [seconds for seconds, entry in zip(laid, stretches.step, strict=True) if entry.kind in ("issued", "waited")]
    # A collective right after another mark has the stretch between, too. All times are made longer by one factor, so that
    # they add up to the whole step.
    assert {round(seconds / min(marks), 9) for seconds in marks} == {1.0, 7.0}
    assert min(marks) == pytest.approx(0.5, rel=0.05)


def test_a_step_that_was_disturbed_counts_little(rehearsed: Rehearsal) -> None:
    """Of three steps, the one that took a hundred times as long changes nothing."""
    stretches = Stretches.of(rehearsed, ROUGH)
    quiet, loud = laps_of(stretches, span=1.0, call=0.25), laps_of(stretches, span=100.0, call=25.0)
    both = stretches.laid(stretches.timed([quiet, loud, quiet]))
    assert both == pytest.approx(stretches.laid(stretches.timed([quiet, quiet])))


def test_times_of_few_blocks_are_laid_out_for_many() -> None:
    """With equal stretches everywhere, a step of nine blocks takes as many stretches more as it has marks more."""
    few, many = (Stretches.of(rehearse(program(depth), SETUP), ROUGH) for depth in (3, 9))
    laid = many.laid(few.timed([laps_of(few, span=1.0, call=0.5)]))
    expected = laps_of(many, span=1.0, call=0.5)
    assert sum(laid) == pytest.approx(expected[-1].end - expected[0].begin, rel=0.05)


def test_a_step_that_does_something_else_is_refused(rehearsed: Rehearsal) -> None:
    """A rank that issued one collective more than the rehearsal has no timings."""
    stretches = Stretches.of(rehearsed, ROUGH)
    laps = laps_of(stretches, span=1.0, call=0.5)
    with pytest.raises(PlanError, match="does the same in every step"):
        stretches.timed([[*laps, laps[1]]])


def test_stretches_of_an_unknown_kind_take_as_long_as_the_known_ones() -> None:
    """By their estimates: what was measured was twice as slow as estimated, so the unknown one is, too."""
    timings = Timings({"a": (4.0, 2.0), "b": (6.0, 3.0), "empty": (7.0, 0.0)}, {})
    assert timings.of_stretch("a", 2.0) == 4.0
    assert timings.of_stretch("a", 3.0) == 6.0
    assert timings.of_stretch("empty", 0.0) == 7.0
    assert timings.of_stretch("unknown", 1.0) == pytest.approx(17.0 / 5.0)
    assert timings.times(10.0).of_stretch("b", 3.0) == 60.0


def test_kernels_share_their_stretch_by_their_estimates(rehearsed: Rehearsal) -> None:
    """Twice as slow a profile changes no share: the same laps are laid out in the same way."""
    slow = attrs.evolve(ROUGH, flops={name: rate / 2 for name, rate in ROUGH.flops.items()}, launch=ROUGH.launch * 2)
    slow = attrs.evolve(slow, memory_bandwidth=ROUGH.memory_bandwidth / 2)
    laid = []
    for profile in (ROUGH, slow):
        stretches = Stretches.of(rehearsed, profile)
        laid.append(stretches.laid(stretches.timed([laps_of(stretches, span=2.0, call=0.5)])))
    assert laid[0] == pytest.approx(laid[1])


def test_a_sample_of_one_rank_has_three_blocks_and_times_its_steps(rehearsed: Rehearsal) -> None:
    """A rank alone runs three of six blocks; steps that are not to be timed leave nothing."""
    alone = attrs.evolve(SETUP, world_size=1)
    sample = Sample.of(program(), alone, Topology(SingleCollectives()))
    assert len(sample._trained.model.blocks) == 3
    sample.step(is_timed=False)
    sample.step()
    sample.step()
    timings = sample.timings()
    predicted = predict(rehearse(program(), alone), ROUGH, timings)
    assert predicted.is_measured
    assert predicted.seconds == pytest.approx(sum(Stretches.of(rehearse(program(), alone), ROUGH).laid(timings)))
    assert predicted.seconds > 0


def test_the_names_of_this_machine() -> None:
    """The name says the transport; others are names of profiles."""
    names = ("this-machine", "this-machine:gloo", "this-machine:pigeon", "h100", None)
    assert [transport_here(name) for name in names] == ["shared_memory", "gloo", None, None, None]
    assert [device_of(name) for name in ("this-machine", "h100")] == ["cpu", "accelerator"]


@each_row(
    ("changed", "message"),
    [({"device": "accelerator"}, "schedule of a cpu"), ({"world_size": 17}, "at most 16 ranks")],
)
def test_what_this_machine_does_not_run(changed: dict[str, Any], message: str) -> None:
    """An accelerator's schedule and too many ranks are refused before anything is started."""
    with pytest.raises(PlanError, match=message):
        here.setup_here(attrs.evolve(SETUP, **changed), "gloo")


def test_a_profile_that_gives_what_was_measured(rehearsed: Rehearsal) -> None:
    """Stretches that took so many times their estimates make every kernel so many times as slow."""
    timings = Timings({"a": (6.0, 2.0), "b": (3.0, 1.0)}, {})
    found = here.profile_here(timings, attrs.evolve(SETUP, transport="gloo"))
    for work in rehearsed.works:
        assert found.seconds_of(work) == pytest.approx(3 * ROUGH.seconds_of(work))
    assert found.launch == pytest.approx(3 * ROUGH.launch)
    assert found.name == "this machine, gloo"


@each_row(
    ("took", "latency", "bandwidth"),
    [((3.0, 5.0), 1.0, 500.0), ((5.0, 3.0), 0.0, 375.0), ((1.0, 5.0), 0.0, 500.0)],
)
def test_a_way_through_the_times_of_collectives(took: tuple[float, float], latency: float, bandwidth: float) -> None:
    """A line through them; through zero, if larger ones took no longer, or small ones less than nothing would."""
    calls = {
        ("waited", "forward", ("all_gather", 2000, None)): took[0],
        ("waited", "backward", ("all_gather", 4000, None)): took[1],
        ("stage", "forward", None): 7.0,
        None: 7.0,
    }
    way = here.profile_here(Timings({}, calls), SETUP).link
    assert (way.latency, way.bandwidth) == pytest.approx((latency, bandwidth))
