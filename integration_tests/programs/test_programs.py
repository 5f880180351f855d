"""Random programs: whatever is trained and however it is sharded, the bits are those of one process."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import hypothesis
import pytest

from flatparam import FullyShardedDataParallel
from flatparam_comm.testing import PATIENCE
from flatparam_core import all_thresholds
from flatparam_runtime import units_in
from integration_tests.programs.axes import AXES, axes_of
from integration_tests.programs.checking import check
from integration_tests.programs.recipes import PRECISIONS, Configuration, Micro, Program, Step
from integration_tests.programs.searching import search, settings
from integration_tests.programs.strategies import HYBRID, SINGLE, cases, programs
from integration_tests.programs.trees import Block, Leaf, Place

FULL = ("",)
LOW = tuple(name for name in PRECISIONS if name)


SPACES: dict[str, dict[str, Any]] = {
    "two ranks": {"ranks": (2,), "kinds": SINGLE, "precisions": FULL},
    "three and four ranks": {"ranks": (3, 4), "kinds": SINGLE, "precisions": FULL},
    "copies of shards": {"ranks": (2, 4), "kinds": HYBRID, "precisions": FULL},
    "precisions": {"ranks": (2, 3), "precisions": LOW},
}


@pytest.mark.timeout(4 * PATIENCE)  # to shrink a failure takes minutes
@pytest.mark.parametrize(
    ("examples", "space"),
    [
        *(pytest.param(3, space, id=name) for name, space in SPACES.items()),
        *(pytest.param(60, space, id=f"{name}, more", marks=pytest.mark.long) for name, space in SPACES.items()),
    ],
)
def test_sharded_is_unsharded(examples: int, space: dict[str, Any]) -> None:
    """Losses, gradients of inputs, norms, gradients and parameters after every step equal one process's, bit for bit.

    All sums are of small multiples of 3/4, so they are exact in any order, over any number of ranks, and in bf16. Norms
    are of the orders 1 and infinity, since squares are too large to be exact.

    The cases are always the same here; `nox -s run -- programs` tries others.
    """
    search(examples, seed=1, **space)


@pytest.mark.long
def test_the_space_has_every_axis() -> None:
    """Each kind of model and each way to wrap that `AXES` names comes up, though most cases are plain."""
    tried: Counter[str] = Counter()

    def all_came_up(case: tuple[Program, Configuration]) -> bool:
        tried.update(["a case", *axes_of(case)])
        return not missing()

    def missing() -> set[str]:
        return {name for name in AXES if not tried[name]}

    # A seed does not repeat hypothesis's draws if other modules are loaded, so the number of draws is not fixed:
    # some 400 do, and 5,000 that lack an axis do not happen to a space that has it.
    generated = settings(5000, phases=[hypothesis.Phase.generate])
    with contextlib.suppress(hypothesis.errors.NoSuchExample):
        hypothesis.find(cases(), all_came_up, settings=generated, random=random.Random(0))
    assert missing() == set()
    assert tried["shards above 2^18 elements"] < tried["a case"] / 4  # they take longer


PAIR = Program(Block((Place(Leaf()), Place(Leaf("single")))), steps=(Step(), Step(), Step()), optimizer="adamw")
LONG = Program(
    Block((Place(Leaf()), Place(Leaf("long")))),
    steps=(Step((Micro("both"), Micro()), clip=float("inf"), look="reload"), Step()),
    optimizer="adamw",
)


@pytest.mark.parametrize("originals", ["no", "yes"])
@pytest.mark.parametrize("number", [0, 2**12, 2**20, 2**40])
def test_long_parameters_and_thresholds(number: int, originals: str) -> None:
    """Shards of more than 2^18 elements are the same sharded and unsharded on either side of every threshold."""
    allowed = {each.name: min(max(each.least, number), each.most) for each in all_thresholds()}
    # Else there are too many pieces.
    allowed["runtime.step_numel"] = max(2**12, allowed["runtime.step_numel"])
    check(LONG, Configuration(4, units=("1",), use_orig_params=originals, thresholds=tuple(allowed.items())))


@pytest.mark.parametrize("originals", ["no", "yes"])
@pytest.mark.parametrize("flipped", [("0.layer.weight",), ("1.layer.weight",), ("0.layer.weight", "0.layer.bias")])
def test_freezing_late(flipped: tuple[str, ...], originals: str) -> None:
    """What is frozen or thawed for one step is so, a single parameter or the flat one that it is in, and not for the next."""
    for frozen in ("", "all"):
        tree = Block((Place(Leaf(frozen=frozen)), Place(Leaf("single"))))
        program = Program(tree, steps=(Step(), Step(flipped=flipped), Step()), optimizer="adamw")
        for units in ((), ("0", "1")):
            check(program, Configuration(units=units, use_orig_params=originals))


@pytest.mark.parametrize("originals", ["no", "yes"])
def test_checkpointing_after_wrapping(originals: str) -> None:
    """With activation checkpointing inside of units that were there before, a program is the same."""
    for checkpointed in (("0",), ("0", "1"), ("1",)):
        check(PAIR, Configuration(units=("0",), use_orig_params=originals, checkpointed=checkpointed))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision(precision: str) -> None:
    """A program is the same in each dtype of computation with each dtype of reduction, on two and on three ranks."""
    for ranks in (2, 3):
        check(PAIR, Configuration(ranks, units=("1",), precision=precision))


def _sabotaged(model: FullyShardedDataParallel) -> None:
    units_in(model)[-1].reducer.divide_factor = 4.0


@pytest.mark.long
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
    "a frozen layer before a reentrant checkpoint, whose inner run ends when the unit was complete": (
        Program(Block((LINEAR, Place(Leaf("scale", "all")), Place(Leaf(), checkpoint="reentrant"), LINEAR))),
        Configuration(units=("0",)),
    ),
    "a unit whose parameters were lent is gathered again at the end of backward": (
        Program(
            Block((Place(Leaf(), used=False), LINEAR, Place(Block((LINEAR, LINEAR)), checkpoint="reentrant"))),
            ties=(("0", "2.1"),),
            steps=(Step(), Step()),
        ),
        Configuration(
            strategy="HYBRID_SHARD",
            shard_size=1,
            units=("1", "2"),
            use_orig_params="yes",
            backward_prefetch="BACKWARD_POST",
        ),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_found_by_the_search(name: str) -> None:
    """Each program that once failed is the same sharded and unsharded."""
    check(*FAILURES[name])
