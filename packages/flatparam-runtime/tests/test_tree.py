"""The choice of the root, the names of the units, and several roots in one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatparam_comm import Collectives, Residency, SingleCollectives, Topology
from flatparam_runtime import ROOT_NAME, EventLog, UnitPlan, observe, shard_module, tree_of, unit_of, units_in

from .models import WIDTH, Block, Stack, batch
from .worlds import check_at_rest, check_same, full_gradients, mean_gradients, run, seeded, sharded

BLOCKS = ["blocks.0", "blocks.1"]


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


def test_the_outermost_forward_makes_the_root() -> None:
    """The unit whose forward is called first from outside is the root; the others are named by their paths below it."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    module(batch())
    assert [unit.name for unit in units_in(module)] == [ROOT_NAME, *BLOCKS]
    trees = {tree_of(unit) for unit in units_in(module)}
    assert len(trees) == 1
    tree = trees.pop()
    assert tree.root is unit_of(module)
    assert tree.units == units_in(module)


def test_a_module_around_units_is_no_root() -> None:
    """Below a module that is no unit, every unit is a root of its own, and has a root's name."""
    module = Stack()
    for block in module.blocks:
        shard_module(block, UnitPlan(Topology(SingleCollectives())))
    module(batch()).sum().backward()
    assert [unit.name for unit in units_in(module)] == [ROOT_NAME, ROOT_NAME]
    assert len({tree_of(unit) for unit in units_in(module)}) == 2
    check_at_rest(module)
    reference = mean_gradients(seeded(Stack), lambda m, _: m(batch()).sum(), 1)
    assert reference.keys() > full_gradients(module).keys()


def test_wrappers_names_do_not_show() -> None:
    """The parts that sharding and checkpoint wrappers put into paths are not in the names of units."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._checkpoint_wrapped_module = module

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self._checkpoint_wrapped_module(x)
            return out

    module = seeded(Stack)
    shard_module(module.blocks[0], UnitPlan(Topology(SingleCollectives())))
    module.blocks[0] = Wrapper(module.blocks[0])
    shard_module(module, UnitPlan(Topology(SingleCollectives())))
    module(batch())
    assert [unit.name for unit in units_in(module)] == [ROOT_NAME, "blocks.0"]


def test_a_child_that_ran_alone_joins_the_tree(ranks: int, free_after_forward: bool) -> None:
    """A unit that was a root, because its forward was called first, belongs to its parent's tree from then on.

    Names are those below the new root, and what the child left unsharded is freed before the parent's pass.
    """

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Stack, collectives, units=BLOCKS, free_after_forward=free_after_forward)
        child = unit_of(module.blocks[0])
        assert child is not None
        # A pass with gradients that no backward follows.
        module.blocks[0](batch())
        assert child.name == ROOT_NAME
        assert child.residency is Residency.UNSHARDED
        loss(module, collectives.rank).backward()
        assert child.name == "blocks.0"
        assert tree_of(child) is tree_of(units_in(module)[0])
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_a_graph_survives_the_change_of_root(ranks: int) -> None:
    """A child's forward before its parent's first, and its backward after it: both gradients arrive."""

    def both(module: nn.Module, rank: int) -> Tensor:
        assert isinstance(module, Stack)
        early: Tensor = module.blocks[0](batch(rank, 1)).square().mean()
        return loss(module, rank) + early

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Stack, collectives, units=BLOCKS)
        both(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), both, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_a_unit_called_outside_the_roots_forward(ranks: int, free_after_forward: bool) -> None:
    """After training through the root, an inner unit called directly trains by itself; then the root again."""

    def alone(module: nn.Module, rank: int) -> Tensor:
        assert isinstance(module, Stack)
        out: Tensor = module.blocks[1](batch(rank)).square().mean()
        return out

    def step(collectives: Collectives) -> list[dict[str, Tensor | None]]:
        module = sharded(Stack, collectives, units=BLOCKS, free_after_forward=free_after_forward)
        found = []
        for each in (loss, alone, loss):
            for parameter in module.parameters():
                parameter.grad = None
            each(module, collectives.rank).backward()
            check_at_rest(module)
            found.append(full_gradients(module))
        return found

    expected = [mean_gradients(seeded(Stack), each, ranks) for each in (loss, alone, loss)]
    for found in run(ranks, step):
        for each, wanted in zip(found, expected, strict=True):
            check_same(each, wanted)


def test_several_roots_do_not_meet(ranks: int) -> None:
    """Two sharded models in one process, one's output the other's input: both train in one backward pass."""

    def chained(first: nn.Module, second: nn.Module, rank: int) -> Tensor:
        out: Tensor = second(first(batch(rank))).square().mean()
        return out

    def step(collectives: Collectives) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        generator = sharded(Block, collectives)
        judge = sharded(Stack, collectives, units=BLOCKS)
        chained(generator, judge, collectives.rank).backward()
        assert tree_of(units_in(generator)[0]) is not tree_of(units_in(judge)[0])
        check_at_rest(generator)
        check_at_rest(judge)
        return full_gradients(generator), full_gradients(judge)

    first, second = seeded(Block), seeded(Stack)
    losses = sum(chained(first, second, rank) for rank in range(ranks))
    assert isinstance(losses, Tensor)
    (losses / ranks).backward()
    for generator, judge in run(ranks, step):
        check_same(generator, {n: p.grad for n, p in first.named_parameters()})
        check_same(judge, {n: p.grad for n, p in second.named_parameters()})


def test_one_root_rests_while_another_trains() -> None:
    """A model that is only used without gradients beside one that trains keeps no memory, and gets no gradient."""
    frozen = sharded(Stack, SingleCollectives(), units=BLOCKS)
    trained = sharded(Block, SingleCollectives())
    with torch.no_grad():
        target = frozen(batch())
    trained(target.new_ones(3, WIDTH)).sum().backward()
    check_at_rest(frozen)
    check_at_rest(trained)
    assert all(parameter.grad is None for parameter in frozen.parameters())


def test_a_tree_holds_nothing_between_passes() -> None:
    """After a step no pass is left: what was true for one iteration is gone, except for the order to expect."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    module(batch()).sum().backward()
    tree = tree_of(units_in(module)[0])
    assert tree.forward is None
    assert tree.backward is None
    assert tree.last_forward is not None
    assert [unit.name for unit in tree.last_forward.began] == [ROOT_NAME, *BLOCKS]
    assert [unit.name for unit in tree.last_forward.ended] == [*BLOCKS, ROOT_NAME]


def test_observing_before_the_first_forward_sees_the_names() -> None:
    """An instrument that was there before the tree grew is told the names below the root from the first event on."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    log = EventLog()
    with observe(module, log):
        module(batch())
    assert {event.unit for event in log.events} == {ROOT_NAME, *BLOCKS}
