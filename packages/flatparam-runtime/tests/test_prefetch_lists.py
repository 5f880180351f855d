"""The units that are gathered ahead: explicit lists, and the depth of the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import SingleCollectives
from flatparam_runtime import BackwardOrder, EventLog, PrefetchPlan, Unit, observe, unit_of, units_in

from .models import Branches, Chain, batch
from .worlds import check_at_rest, check_training, sharded

DEPTH = 4
BLOCKS = [f"blocks.{i}" for i in range(DEPTH)]
NEVER = PrefetchPlan(0, BackwardOrder.NEVER)


def chain() -> Chain:
    return Chain(DEPTH)


def blocks(module: nn.Module, numbers: Sequence[int]) -> list[Unit]:
    found = [unit_of(module.get_submodule(BLOCKS[number])) for number in numbers]
    return [unit for unit in found if unit is not None]


def set_lists(module: nn.Module, direction: str, lists: dict[int, Sequence[int]]) -> None:
    """Have block ``i`` gather the blocks ``lists[i]`` ahead."""
    for number, ahead in lists.items():
        for unit in blocks(module, [number]):
            setattr(unit.links, f"{direction}_prefetch", blocks(module, ahead))


def gathers(module: nn.Module, direction: str) -> list[str]:
    """The gathers (``g``), uses (``u``) and releases (``r``) of blocks in one direction of one step."""
    logs = {"forward": EventLog(), "backward": EventLog()}
    with observe(module, logs["forward"]):
        out = module(batch().requires_grad_())
    with observe(module, logs["backward"]):
        out.sum().backward()
    check_at_rest(module)
    letters = {"unshard": "g", "use": "u", "reshard": "r"}
    events = [event for event in logs[direction].events if event.nbytes and event.kind in letters]
    return [letters[event.kind] + event.unit.removeprefix("blocks.") for event in events]


@each_row(
    ("lists", "expected"),
    [
        ({}, "g0 u0 r0 g1 u1 r1 g2 u2 r2 g3 u3 r3"),
        ({0: [1]}, "g0 g1 u0 r0 u1 r1 g2 u2 r2 g3 u3 r3"),
        ({0: [2, 1]}, "g0 g2 g1 u0 r0 u1 r1 u2 r2 g3 u3 r3"),
        ({1: [2, 3]}, "g0 u0 r0 g1 g2 g3 u1 r1 u2 r2 u3 r3"),
        ({2: [0, 1]}, "g0 u0 r0 g1 u1 r1 g2 g0 g1 u2 r2 g3 u3 r3 r0 r1"),
        ({0: [0]}, "g0 u0 r0 g1 u1 r1 g2 u2 r2 g3 u3 r3"),
    ],
)
def test_forward_lists(lists: dict[int, Sequence[int]], expected: str) -> None:
    """The units on a unit's list are gathered when its forward begins, in that order, from the first pass on.

    Units that were gathered in vain are freed at the end of the pass.
    """
    module = sharded(chain, SingleCollectives(), units=BLOCKS, prefetch=NEVER)
    set_lists(module, "forward", lists)
    for _ in range(2):
        assert " ".join(gathers(module, "forward")) == expected


@each_row(
    ("lists", "expected"),
    [
        ({}, "g3 u3 r3 g2 u2 r2 g1 u1 r1 g0 u0 r0"),
        ({3: [2]}, "g3 g2 u3 r3 u2 r2 g1 u1 r1 g0 u0 r0"),
        ({3: [1, 2]}, "g3 g1 g2 u3 r3 u2 r2 u1 r1 g0 u0 r0"),
        ({2: [1, 0]}, "g3 u3 r3 g2 g1 g0 u2 r2 u1 r1 u0 r0"),
        ({1: [3]}, "g3 u3 r3 g2 u2 r2 g1 u1 r1 g0 u0 r0"),
    ],
)
def test_backward_lists(lists: dict[int, Sequence[int]], expected: str) -> None:
    """The same holds in the backward pass; units that are done in it are not gathered again."""
    module = sharded(chain, SingleCollectives(), units=BLOCKS, prefetch=NEVER)
    set_lists(module, "backward", lists)
    for _ in range(2):
        assert " ".join(gathers(module, "backward")) == expected


def test_a_list_takes_the_place_of_the_plan() -> None:
    """A list, even an empty one, replaces the plan's rule for its unit; ``None`` restores the rule."""
    module = sharded(chain, SingleCollectives(), units=BLOCKS, prefetch=PrefetchPlan(1))
    gathers(module, "forward")
    set_lists(module, "forward", {0: [], 1: [3]})
    assert " ".join(gathers(module, "forward")) == "g0 u0 r0 g1 g3 u1 r1 g2 u2 r2 u3 r3"
    set_lists(module, "backward", {3: [], 2: [0]})
    # The root's backward begins with that of its last block.
    units_in(module)[0].links.backward_prefetch = []
    assert " ".join(gathers(module, "backward")) == "g3 u3 r3 g2 g0 u2 r2 g1 u1 r1 u0 r0"
    for unit in units_in(module):
        unit.links.forward_prefetch = None
        unit.links.backward_prefetch = None
    assert " ".join(gathers(module, "forward")) == "g0 g1 u0 r0 g2 u1 r1 g3 u2 r2 u3 r3"
    assert " ".join(gathers(module, "backward")) == "g3 g2 u3 r3 g1 u2 r2 g0 u1 r1 u0 r0"


@each_row(
    ("order", "depth", "expected"),
    [
        (BackwardOrder.BEFORE_COMPUTE, 1, "g3 g2 u3 r3 g1 u2 r2 g0 u1 r1 u0 r0"),
        (BackwardOrder.BEFORE_COMPUTE, 2, "g3 g2 g1 u3 r3 g0 u2 r2 u1 r1 u0 r0"),
        (BackwardOrder.BEFORE_COMPUTE, 9, "g3 g2 g1 g0 u3 r3 u2 r2 u1 r1 u0 r0"),
        (BackwardOrder.AFTER_COMPUTE, 1, "g3 u3 r3 g2 u2 r2 g1 u1 r1 g0 u0 r0"),
        (BackwardOrder.AFTER_COMPUTE, 2, "g3 u3 r3 g2 g1 u2 r2 g0 u1 r1 u0 r0"),
        (BackwardOrder.NEVER, 2, "g3 u3 r3 g2 u2 r2 g1 u1 r1 g0 u0 r0"),
    ],
)
def test_backward_depth(order: BackwardOrder, depth: int, expected: str) -> None:
    """As many units are gathered ahead as the plan says, the next one first, and no unit twice."""
    plan = PrefetchPlan(0, order, depth)
    module = sharded(chain, SingleCollectives(), units=BLOCKS, prefetch=plan)
    for _ in range(2):
        assert " ".join(gathers(module, "backward")) == expected


@each_row("lists", [{0: [3, 2, 1, 0]}, {1: [0, 0], 2: [1]}, {i: range(DEPTH) for i in range(DEPTH)}])
@each_row("direction", ["forward", "backward"])
def test_no_list_changes_gradients(
    lists: dict[int, Sequence[int]],
    direction: str,
    ranks: int,
    use_orig_params: bool,
    free_after_forward: bool,
) -> None:
    """Lists with everything, with what is over, and with a unit twice give the gradients of the local model."""

    def loss(module: nn.Module, rank: int) -> Tensor:
        set_lists(module, direction, lists)
        out: Tensor = module(batch(rank)).square().mean()
        return out

    plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    check_training(chain, [loss] * 2, ranks, units=BLOCKS, **plan)


def test_a_listed_unit_that_is_not_called(ranks: int) -> None:
    """A unit that was gathered by a list and is not used in the pass is freed, and gets no gradient."""

    def loss(module: nn.Module, rank: int, way: str) -> Tensor:
        left, right = unit_of(module.left), unit_of(module.right)
        if left is not None and right is not None:
            left.links.forward_prefetch = [right]
            left.links.backward_prefetch = [right]
            right.links.forward_prefetch = [left]
            right.links.backward_prefetch = [left]
        out: Tensor = module(batch(rank), way).square().mean()
        return out

    steps = [lambda module, rank, way=way: loss(module, rank, way) for way in ("l", "lr", "r", "rl")]
    check_training(Branches, steps, ranks, units=["left", "right"])
