"""`reduction="exact"`: one hash for every way to train, through the wrapper and `fully_shard`."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import sums
import torch
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, clip_grad_norm_, fully_shard
from flatparam_comm import Collectives, RankError, Topology, run_threads
from flatparam_comm.testing import run_processes
from flatparam_comm.transfer.reduction import PART_NBYTES
from flatparam_runtime import NonfiniteError, summon_full_params, units_in

STEPS = 4
WAYS: dict[str, sums.Way] = {
    "eight ranks": (8, "FULL_SHARD", "layers", False, "threads", "any", False),
    "grad op": (3, "SHARD_GRAD_OP", "blocks", True, "threads", "5 + 3", False),
    "whole copies": (4, "NO_SHARD", "one unit", False, "threads", "in turn", False),
    "hybrid": (4, "HYBRID_SHARD", "layers", True, "threads", "any", False),
    "resumed": (4, "FULL_SHARD", "one unit", False, "threads", "one rank", True),
    "gloo": (2, "FULL_SHARD", "blocks", True, "gloo", "5 + 3", True),
    "shared memory": (3, "SHARD_GRAD_OP", "layers", False, "shared_memory", "any", False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "optimizer", [pytest.param(each, marks=() if each == "AdamW" else pytest.mark.long) for each in sums.OPTIMIZERS]
)
def test_one_hash(optimizer: str) -> None:
    """Parameters and optimizer states have one hash, whatever the ranks, strategy, transport and checkpoint between."""
    alone = (1, "FULL_SHARD", "blocks", True, "threads", "in turn", False)
    expected = sums.hash_of(alone, optimizer, STEPS)
    for name, way in WAYS.items():
        # Muon is for matrices, which a flat parameter is not.
        way = (*way[:3], True, *way[4:]) if optimizer == "Muon" else way
        assert sums.hash_of(way, optimizer, STEPS) == expected, name


def trained_in_place(ranks: Collectives) -> tuple[list[bytes], list[float]]:
    """Train a model that `fully_shard` has sharded; returns the full parameters and the norms."""
    model: Any = sums.build()
    for module in (model[1], model[2], model):
        fully_shard(module, mesh=ranks, reduction="exact")
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(STEPS):
        for number in range(sums.MICRO_BATCHES):
            if number % ranks.size == ranks.rank:
                with model.accumulate(weight=number):
                    sums.loss(model, step, number)[0].backward()
        model.reduce_gradients()
        norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    with summon_full_params(model):
        return [parameter.detach().numpy().tobytes() for parameter in model.parameters()], norms


def test_in_place() -> None:
    """`fully_shard`, and the function that clips by parameters, have the bits of one rank, too."""
    [expected] = run_threads(1, trained_in_place)
    for size in (2, 3):
        found = run_threads(size, trained_in_place)
        assert all(each == expected for each in found)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_what_is_not_finite_is_told(strategy: str) -> None:
    """With `nonfinite="raise"`, an infinite gradient of one rank's micro-batch is an error on every rank."""

    def rank(ranks: Collectives) -> None:
        where: Any = ranks if strategy == "FULL_SHARD" else Topology.cut(ranks, [[0, 1], [2, 3]])
        model = FSDP(
            sums.build(),
            where,
            sharding_strategy=ShardingStrategy[strategy],
            reduction="exact",
            nonfinite="raise",
            use_orig_params=True,
        )
        for step in range(2):
            for number in range(2):
                with model.accumulate(weight=1):
                    factor = float("inf") if (ranks.rank, step, number) == (1, 1, 0) else 1.0
                    (sums.loss(model, step, number)[0] * factor).backward()
            if step == 0:
                model.reduce_gradients()
                continue
            with pytest.raises(NonfiniteError):
                model.reduce_gradients()

    run_threads(4, rank)


def test_an_unknown_reduction() -> None:
    """A word that is neither is refused, by both ways in."""

    def rank(ranks: Collectives) -> None:
        with pytest.raises(ValueError, match="expected reduction to be 'default' or 'exact', found 'fast'"):
            FSDP(sums.build(), ranks, reduction="fast")  # type: ignore[arg-type]
        fully_shard(sums.build(), mesh=ranks, reduction="fast")  # type: ignore[arg-type]

    with pytest.raises(RankError, match="found 'fast'"):
        run_threads(2, rank)


@each_row("settings", [{}, {"reduction": "exact"}, {"wire": "bf16"}])
def test_accumulating_as_fsdp2_does(settings: dict[str, Any]) -> None:
    """`set_requires_gradient_sync(False)` collects, whatever adds the gradients, and the next pass reduces all."""

    def rank(ranks: Collectives) -> torch.Tensor:
        model: Any = nn.Linear(4, 4)
        fully_shard(model, mesh=ranks, **settings)
        for syncs in (False, True):
            model.set_requires_gradient_sync(syncs)
            model(torch.full((2, 4), ranks.rank + 1.0)).sum().backward()
        found: torch.Tensor = model.weight.grad
        return found

    for found in run_threads(2, rank):
        # Two passes, of two rows each, and the mean of two ranks' inputs.
        assert torch.equal(found, torch.full_like(found, 2 * 2 * 1.5))


def without_a_buffer(ranks: Collectives, least: int) -> tuple[list[bytes], bool]:
    """Train over shared memory; returns the gradients, and whether they travelled from where autograd left them."""
    with PART_NBYTES.set_to(least):
        model = sums.wrapped(ranks, (ranks.size, "FULL_SHARD", "blocks", True, "shared_memory", "any", False))
        found = []
        for step in range(3):
            # One rank has nothing in the second step, and passes without weights are there, too.
            for number in range(step, step + 1 if step != 1 or ranks.rank else step):
                with model.accumulate(weight=number + 1 + ranks.rank):
                    torch.autograd.backward(sums.loss(model, step, number + ranks.rank)[0])
            model.reduce_gradients()
            torch.autograd.backward(sums.loss(model, step, ranks.rank)[0])
            gradients = [parameter.grad for parameter in model.parameters()]
            found.extend(each.numpy().tobytes() for each in gradients if each is not None)
            model.zero_grad()
        [unit] = [unit for unit in units_in(model) if unit.name == "1"]
        return found, unit.reducer.averaging(unit.handles).in_parts


def test_gradients_that_are_not_copied() -> None:
    """Through shared memory large gradients travel without a flat buffer, with the same bits."""
    copied = run_processes(3, without_a_buffer, 2**20)
    taken = run_processes(3, without_a_buffer, 0)
    assert [each[0] for each in copied] == [each[0] for each in taken]
    assert {each[1] for each in copied} == {False}
    assert {each[1] for each in taken} == {True}


def over_a_narrow_wire(ranks: Collectives, transport: str) -> str:
    """Train with gradients that travel in bfloat16; returns the hash of the parameters."""
    where: Any = ranks if transport == "threads" else None if transport == "gloo" else transport
    model = FSDP(sums.build(), where, wire="bf16", use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        with model.no_sync():
            torch.autograd.backward(sums.loss(model, step, ranks.rank)[0])
        torch.autograd.backward(sums.loss(model, step, 2 + ranks.rank)[0])
        optimizer.step()
        optimizer.zero_grad()
    return sums.digest_of(model.state_dict())


def test_a_narrow_wire() -> None:
    """Gradients that travel in bfloat16 have equal sums over every transport."""
    found = {*run_threads(2, over_a_narrow_wire, "threads")}
    for transport in ("gloo", "shared_memory"):
        found |= {*run_processes(2, over_a_narrow_wire, transport)}
    assert len(found) == 1


def to_float32(value: Fraction) -> float:
    """Round to nearest, and to even."""
    near = torch.tensor(float(value), dtype=torch.float32)
    around = [near, *(torch.nextafter(near, torch.tensor(end)) for end in (-math.inf, math.inf))]
    return min((abs(Fraction(float(each)) - value), int(each.view(torch.int32)) & 1, float(each)) for each in around)[2]


def test_thirty_distributions() -> None:
    """Gradients are the exact weighted means of those that one process of plain torch computes, rounded once."""
    spreads = [sums.spread(seed, 2 + seed % 2) for seed in range(30)]

    def rank(ranks: Collectives, seed: int) -> list[torch.Tensor]:
        way = (ranks.size, "FULL_SHARD", "blocks", True, "threads", "any", False)
        model = sums.wrapped(ranks, way)
        for number in spreads[seed][ranks.rank]:
            with model.accumulate(weight=number + 1):
                torch.autograd.backward(sums.loss(model, seed, number)[0])
        model.reduce_gradients()
        with FSDP.summon_full_params(model, with_grads=True):
            return [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]

    plain = sums.build()
    for seed, mine in enumerate(spreads):
        exact: list[Fraction] = []
        for number in [number for numbers in mine for number in numbers]:
            gradients = torch.autograd.grad(sums.loss(plain, seed, number)[0], [*plain.parameters()])
            flat = torch.cat([gradient.flatten() for gradient in gradients]).tolist()
            exact = [
                a + (number + 1) * Fraction(b) for a, b in zip(exact or [Fraction(0)] * len(flat), flat, strict=True)
            ]
        total = sum(number + 1 for numbers in mine for number in numbers)
        wanted = [to_float32(value / total) for value in exact]
        for found in run_threads(len(mine), rank, seed):
            assert torch.cat(found).tolist() == wanted, seed
