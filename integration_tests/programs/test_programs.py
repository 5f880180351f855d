"""Random programs: whatever is trained and however it is sharded, the bits are those of one process."""

from __future__ import annotations

import random
from typing import Any

import hypothesis
import pytest

from flatparam import FullyShardedDataParallel
from flatparam_runtime import units_in
from integration_tests.programs.checking import check
from integration_tests.programs.recipes import PRECISIONS, Configuration, Micro, Program, Step
from integration_tests.programs.searching import search, settings
from integration_tests.programs.strategies import HYBRID, SINGLE, programs
from integration_tests.programs.trees import Block, Leaf, Place

FULL = ("",)
LOW = tuple(name for name in PRECISIONS if name)


@pytest.mark.timeout(600)  # to shrink a failure takes minutes
@pytest.mark.parametrize(
    ("examples", "space"),
    [
        pytest.param(80, {"ranks": (2,), "kinds": SINGLE, "precisions": FULL}, id="two ranks"),
        pytest.param(60, {"ranks": (3, 4), "kinds": SINGLE, "precisions": FULL}, id="three and four ranks"),
        pytest.param(60, {"ranks": (2, 4), "kinds": HYBRID, "precisions": FULL}, id="copies of shards"),
        pytest.param(50, {"ranks": (2, 3), "precisions": LOW}, id="precisions"),
    ],
)
def test_sharded_is_unsharded(examples: int, space: dict[str, Any]) -> None:
    """Losses, gradients of inputs, norms, gradients and parameters after every step equal one process's, bit for bit.

    All sums are of small multiples of 3/4, so they are exact in any order, over any number of ranks, and in bf16. Norms
    are of the orders 1 and infinity, since squares are too large to be exact.
    """
    search(examples, **space)


def _sabotaged(model: FullyShardedDataParallel) -> None:
    units_in(model)[-1].divide_factor = 4.0


def test_a_wrong_average_of_one_unit_is_found() -> None:
    """With the gradients of the last unit divided by 4 on 2 ranks, the search fails, and shrinks to one layer."""

    def fails(case: tuple[Program, Configuration]) -> bool:
        try:
            check(*case, _sabotaged)
        except AssertionError as error:
            return "gradients" in str(error)
        return False

    configuration = Configuration(units=("0",))
    space = programs(depth=1).map(lambda program: (program, configuration))
    program, _ = hypothesis.find(space, fails, settings=settings(100), random=random.Random(0))
    assert program == Program(Block((Place(Leaf()),)))


# What the search has found


LINEAR = Place(Leaf())
TWICE = Step((Micro(forwards=2),))
FAILURES = {
    "a state dict with a tie across units is loaded again": (
        Program(Block((LINEAR, LINEAR, LINEAR)), ties=(("0", "1"),), steps=(Step(look="reload"),)),
        Configuration(units=("1",)),
    ),
    "a tie within a unit, one use in a reentrant checkpoint": (
        Program(Block((LINEAR, LINEAR, Place(Leaf(), checkpoint="reentrant"))), ties=(("1", "2"),)),
        Configuration(units=("0",)),
    ),
    "a tie across units, the owner in a reentrant checkpoint": (
        Program(Block((LINEAR, LINEAR, Place(Leaf(), checkpoint="reentrant"))), ties=(("1", "2"),)),
        Configuration(units=("0", "2")),
    ),
    "a tie whose owner is not called": (
        Program(Block((LINEAR, Place(Leaf(), when="never"))), ties=(("0", "1"),)),
        Configuration(units=("1",)),
    ),
    "one backward pass of two forward passes, of which one skips a layer": (
        Program(Block((Place(Leaf(), when="odd"), LINEAR)), steps=(TWICE,)),
        Configuration(units=("1",)),
    ),
    "a unit called twice, of whose own parameters none is used": (
        Program(Block((Place(Block((Place(Leaf(), used=False), LINEAR)), calls=2),))),
        Configuration(units=("0", "0.1")),
    ),
    "a frozen layer in a checkpoint within a unit": (
        Program(Block((LINEAR, Place(Leaf("norm", "all"), checkpoint="non-reentrant"), LINEAR))),
        Configuration(units=("0",)),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_found_by_the_search(name: str) -> None:
    """Each program that once failed is the same sharded and unsharded."""
    check(*FAILURES[name])
