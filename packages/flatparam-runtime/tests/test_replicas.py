"""Parameters sharded inside groups of ranks, of which several hold copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, Topology, Totals
from flatparam_comm.testing import rectangle
from flatparam_runtime import UnitPlan, no_sync, shard_module, units_in

from .models import WIDTH, Branches, Stack, batch
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    full_gradients,
    full_parameters,
    mean_gradients,
    run,
    seeded,
    sharded,
    zero_gradients,
)

RANKS = 4
BLOCKS = ["blocks.0", "blocks.1"]


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


def scaled(gradients: Grads, factor: float) -> Grads:
    return {name: None if value is None else value * factor for name, value in gradients.items()}


def expected_gradients(module: nn.Module, losses: Callable[[nn.Module, int], Tensor], shards: int) -> Grads:
    """The mean over the ranks, summed as the ranks do: in each shard group first, then over the groups."""
    rows = [
        mean_gradients(module, lambda m, rank, first=first: losses(m, first + rank), shards)
        for first in range(0, RANKS, shards)
    ]
    total = dict(rows[0])
    for row in rows[1:]:
        for name, part in row.items():
            before = total[name]
            total[name] = part if before is None or part is None else before + part
    return scaled(total, 1 / len(rows))


def recorded(where: Topology) -> tuple[Topology, ByteLedger, ByteLedger]:
    """The same groups, with ledgers of what is sent inside a shard group and across."""
    assert where.replicate is not None
    inside, across = ByteLedger(), ByteLedger()
    groups = RecordingCollectives(where.shard, inside), RecordingCollectives(where.replicate, across)
    return Topology(*groups), inside, across


@pytest.fixture(params=[1, 2, 4], ids=["copies-only", "2x2", "shards-only"])
def shards(request: pytest.FixtureRequest) -> int:
    """The number of ranks, of four, that share the parameters."""
    return int(request.param)


def test_training(shards: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """In a rectangle of any shape gradients are means over all ranks, and SGD keeps the copies equal, bit by bit."""

    def steps(world: Collectives) -> tuple[list[Grads], dict[str, Tensor]]:
        plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
        module = sharded(Stack, rectangle(world, shards), units=BLOCKS, **plan)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            loss(module, world.rank).backward()
            check_at_rest(module)
            found.append(full_gradients(module))
            optimizer.step()
        return found, full_parameters(module)

    local = seeded(Stack)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.25)
    expected = []
    for _ in range(2):
        expected.append(expected_gradients(local, loss, shards))
        for name, parameter in local.named_parameters():
            parameter.grad = expected[-1][name]
        optimizer.step()
        optimizer.zero_grad()
    for found, values in run(RANKS, steps):
        for each, wanted in zip(found, expected, strict=True):
            check_same(each, wanted)
        check_same(dict(values), dict(local.named_parameters()))


@pytest.mark.parametrize("way", ["no_sync", "requires_all_reduce"])
def test_accumulation(way: str, shards: int, use_orig_params: bool) -> None:
    """Gradients are collected in full with ``no_sync``, or as shards without the sum over copies; then summed once."""

    def steps(world: Collectives) -> tuple[Grads, list[int]]:
        topology, inside, across = recorded(rectangle(world, shards))
        module = sharded(Stack, topology, units=BLOCKS, use_orig_params=use_orig_params)
        loss(module, world.rank).backward()
        zero_gradients(module)
        inside.reset()
        across.reset()
        if way == "no_sync":
            with no_sync(module):
                loss(module, world.rank).backward()
        else:
            for unit in units_in(module):
                unit.reducer.sums_copies = False
            loss(module, world.rank).backward()
            for unit in units_in(module):
                unit.reducer.sums_copies = True
        counts = [ledger.by_label().get("blocks.0", Totals()).count for ledger in (inside, across)]
        assert all(parameter.grad is None for parameter in module.parameters())
        loss(module, world.rank).backward()
        check_at_rest(module)
        assert not any(unit.reducer._partial for unit in units_in(module))
        return full_gradients(module), counts

    expected = scaled(expected_gradients(seeded(Stack), loss, shards), 2.0)
    for found, (reduced, summed) in run(RANKS, steps):
        check_same(found, expected, exact=way == "no_sync" or shards != 2)
        # Two of these are gathers.
        assert reduced == (3 if way == "requires_all_reduce" else 2)
        assert summed == 0


def test_what_waits_for_the_copies_is_not_lost() -> None:
    """A parameter that only one rank uses, and only in the first micro-batch, gets its part of the sum on all ranks."""

    class Gated(Branches):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.full((WIDTH,), 2.0))

        def forward(self, x: Tensor, open_: bool = False) -> Tensor:
            x = super().forward(x)
            return x * self.gate if open_ else x

    def part(module: nn.Module, rank: int, step: int) -> Tensor:
        out: Tensor = module(batch(rank, step), rank == 3 and step == 0).square().mean()
        return out

    def steps(world: Collectives) -> Grads:
        module = sharded(Gated, rectangle(world, 2), units=["left", "right"], use_orig_params=True)
        for step in range(2):
            for unit in units_in(module):
                unit.reducer.sums_copies = step == 1
            part(module, world.rank, step).backward()
        check_at_rest(module)
        return full_gradients(module)

    both = expected_gradients(seeded(Gated), lambda m, rank: part(m, rank, 0) + part(m, rank, 1), 2)
    assert both["gate"] is not None
    for found in run(RANKS, steps):
        assert found["gate"] is not None
        # Micro-batches are added after ranks.
        check_same(found, both, exact=False)


@pytest.mark.parametrize("factor", [1.0, 3.0, 8.0])
def test_any_divisor(factor: float, shards: int) -> None:
    """``divide_factor`` takes the place of the number of ranks; 1 gives the sum."""

    def step(world: Collectives) -> Grads:
        module = sharded(Stack, rectangle(world, shards), units=BLOCKS)
        for unit in units_in(module):
            unit.reducer.divide_factor = factor
        loss(module, world.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    mean = expected_gradients(seeded(Stack), loss, shards)
    expected = {name: None if value is None else value * RANKS / factor for name, value in mean.items()}
    for found in run(RANKS, step):
        check_same(found, expected)


def test_where_bytes_go(shards: int) -> None:
    """Gathers stay inside the shard group; what goes between copies is each unit's reduced shard."""

    def step(world: Collectives) -> None:
        topology, inside, across = recorded(rectangle(world, shards))
        module = sharded(Stack, topology, units=BLOCKS)
        loss(module, world.rank).backward()
        assert set(across.by_op()) == {"all_reduce"}
        assert inside.by_op().keys() >= {"all_gather", "reduce_scatter"}
        for unit in units_in(module):
            (handle,) = unit.handles
            assert across.by_label()[unit.name].payload_nbytes == handle.layout.shard_numel * 4

    run(RANKS, step)


class GatedBlock(nn.Module):
    """A linear layer, and a gate that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor, open_: bool = False) -> Tensor:
        x = self.layer(x)
        return x * self.gate if open_ else x


class TwoGates(nn.Module):
    """Two gated blocks, and a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GatedBlock(), GatedBlock()
        self.gate = nn.Parameter(torch.full((WIDTH,), 3.0))

    def forward(self, x: Tensor, opens: str = "") -> Tensor:
        x = self.second(self.first(x, "1" in opens), "2" in opens)
        return x * self.gate if "3" in opens else x


@each_row("opener", range(RANKS))
def test_units_over_groups_of_their_own(opener: int) -> None:
    """One tree, a unit over all ranks, one in a rectangle, one of copies: each learns of a gradient that one rank has."""

    def losses(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank), "123" if rank == opener else "").square().mean()
        return out

    def step(world: Collectives) -> Grads:
        module = seeded(TwoGates)
        shapes = {"first": rectangle(world, 2), "second": Topology(world), "": rectangle(world, 1)}
        for name, topology in shapes.items():
            shard_module(module.get_submodule(name), UnitPlan(topology, use_orig_params=True))
        losses(module, world.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(TwoGates), losses, RANKS)
    for found in run(RANKS, step):
        assert all(found[name] is not None for name in ("gate", "first.gate", "second.gate"))
        # Each shape adds the ranks in an order of its own.
        check_same(found, expected, exact=False)
