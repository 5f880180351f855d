"""Random programs that are saved and loaded: under any other sharding it is what was saved, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from flatparam import FullyShardedDataParallel
from flatparam_comm import Collectives, run_threads
from flatparam_comm.testing import PATIENCE
from integration_tests.programs.processes import check_in_processes
from integration_tests.programs.recipes import Configuration, Program, Step
from integration_tests.programs.running import Sharded, Training, shard
from integration_tests.programs.saving import PROCESSES, Saving, check_saving
from integration_tests.programs.searching import draw_savings, search_savings
from integration_tests.programs.trees import Block, Leaf, Place

LINEAR = Place(Leaf())
THREE = Program(Block((LINEAR, Place(Leaf("plain")), Place(Leaf("single")))), steps=(Step(), Step()), optimizer="adamw")
TIED = Program(Block((LINEAR, LINEAR)), ties=(("0", "1"),), steps=(Step(), Step()))


WAYS = {
    "checkpointer": ("checkpointer", "asynchronous"),
    "conversions": ("torch", "dcp", "reshard"),
    "full state dicts": ("full", "streamed", "broadcast"),
}


@pytest.mark.timeout(4 * PATIENCE)  # to shrink a failure takes minutes
@pytest.mark.parametrize(
    ("examples", "ways"),
    [
        *(pytest.param(1, ways, id=name) for name, ways in WAYS.items()),
        *(pytest.param(20, ways, id=f"{name}, more", marks=pytest.mark.long) for name, ways in WAYS.items()),
    ],
)
def test_what_is_loaded_is_what_was_saved(examples: int, ways: tuple[str, ...]) -> None:
    """Under another wrapping, strategy, exposure and world size, parameters, buffers and optimizer states equal those of
    one process bit for bit when they are loaded, and so do losses and parameters in further training.

    The cases are always the same here; `nox -s run -- programs --of saving` tries others.
    """
    search_savings(examples, seed=1, ways=ways)


@pytest.mark.parametrize("way", ["checkpointer", "full", "streamed", "broadcast"])
@pytest.mark.parametrize("originals", ["no", "yes"])
def test_optimizers_that_list_parameters_in_another_order(originals: str, way: str) -> None:
    """Saved and loaded is what belongs to each parameter, where each rank's optimizer lists them in an order of its own."""
    before = Configuration(3, units=("0", "1"), use_orig_params=originals, turned=True)
    for after in (
        before,
        Configuration(2, units=("1",)),
        Configuration(2, use_orig_params="yes", turned=True),
    ):
        check_saving(THREE, before, after, Saving(way))


@pytest.mark.processes
def test_sharded_state_in_processes() -> None:
    """The same of sharded and local state dicts in memory, and of DCP at a different world size."""
    assert check_in_processes(draw_savings(4, seed=1, ways=PROCESSES)) > 0


@pytest.mark.processes
def test_a_local_state_with_a_tie_across_units() -> None:
    """A local state loads where one unit borrows what is in the flat parameter of another; it was missed there."""
    units = Configuration(units=("0", "1"))
    assert check_in_processes([(TIED, units, units, Saving("local"))]) == 1


# What the search has found


TWO = Program(Block((LINEAR, LINEAR)), steps=(Step(), Step()), optimizer="two", apart="place")
FAILURES = {
    "optimizer state of a tied parameter, which another unit owns": (
        TIED,
        Configuration(units=("1",)),
        Configuration(units=("0",)),
        Saving("full"),
    ),
    "two optimizers in a torch file": (
        TWO,
        Configuration(units=("0",)),
        Configuration(units=("0",)),
        Saving("torch"),
    ),
    "two optimizers in DCP": (TWO, Configuration(units=("0",)), Configuration(units=("0",)), Saving("dcp")),
    "a state broadcast in a world of one": (
        Program(Block((LINEAR,)), steps=(Step(), Step())),
        Configuration(),
        Configuration(ranks=1),
        Saving("broadcast"),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_found_by_the_search(name: str) -> None:
    """Each program that once could not be loaded is what was saved."""
    check_saving(*FAILURES[name])


def test_a_lost_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where loading drops the optimizer's state of one parameter, the search fails."""
    load = FullyShardedDataParallel.optim_state_dict_to_load

    def dropping(*arguments: Any, **options: Any) -> Any:
        state = load(*arguments, **options)
        state["state"].pop(0, None)
        return state

    monkeypatch.setattr(FullyShardedDataParallel, "optim_state_dict_to_load", staticmethod(dropping))
    program = Program(Block((LINEAR,)), steps=(Step(), Step()))
    with pytest.raises(AssertionError, match="loaded states"):
        check_saving(program, Configuration(), Configuration(), Saving("full"))


def test_a_tied_state_is_named_as_in_the_plain_model() -> None:
    """Whichever unit owns a tied parameter, its optimizer state has the first of its names."""

    def names(world: Collectives, units: tuple[str, ...]) -> set[str]:
        model = shard(TIED, Configuration(units=units), world)
        training = Training.begin(TIED, Sharded(model, [world.rank]))
        training.run(TIED.steps)
        return set(FullyShardedDataParallel.optim_state_dict(model, training.optimizers[0])["state"])

    expected = {"0.layer.weight", "0.layer.bias", "1.layer.bias"}
    for units in ((), ("0",), ("1",)):
        assert run_threads(2, names, units) == [expected] * 2
