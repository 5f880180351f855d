"""`ExactSums` on the runtime: the same bits, whichever rank does which micro-batch, and however many ranks there are."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import ByteLedger, Collectives, RankError, RecordingCollectives, SingleCollectives
from flatparam_comm.testing import rectangle, run_threads
from flatparam_runtime import (
    FlatParamError,
    Topology,
    UnitPlan,
    clip_grad_norm_,
    no_sync,
    shard_module,
    summon_full_params,
    units_in,
)
from flatparam_sums import ExactSums, Wire, accumulate, reduce_gradients

COUNT = 6


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def shard(topology: Topology, **plan: object) -> nn.Sequential:
    model = build()
    made = UnitPlan(topology, sums=ExactSums(), **plan)  # type: ignore[arg-type]
    for module in (model[2], model):
        shard_module(module, made)
    return model


def batches(step: int) -> list[tuple[Tensor, int]]:
    """Return the micro-batches of a step, with gradients of very different sizes, and their weights."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.randint(1, 6, (COUNT,), generator=generator).tolist()
    scales = torch.randint(-4, 2, (COUNT,), generator=generator).tolist()
    return [
        (torch.randn(size, 5, generator=generator) * 10.0**scale, size)
        for size, scale in zip(sizes, scales, strict=True)
    ]


PLACES: dict[str, Callable[[int, int, int], int]] = {
    "in turn": lambda step, number, ranks: number * ranks // COUNT,
    "any": lambda step, number, ranks: random.Random(f"{step} {number}").randrange(ranks),
    "the last": lambda step, number, ranks: ranks - 1,
}
"""The rank of each micro-batch."""


def digest(model: nn.Module) -> str:
    with summon_full_params(model):
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()


def trained(topology: Topology, place: str, **plan: object) -> tuple[str, list[float]]:
    """Train for some steps; returns the hash of the parameters, and the norms."""
    model, norms = shard(topology, **plan), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for number, (x, size) in enumerate(batches(step)):
            if PLACES[place](step, number, topology.data_parallel_size) == topology.rank:
                with accumulate(model, weight=size):
                    model(x).square().mean().backward()
        reduce_gradients(model)
        norms.append(float(clip_grad_norm_(model, 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), norms


@pytest.fixture(scope="module")
def alone() -> tuple[str, list[float]]:
    """One rank that does everything."""
    [found] = run_threads(1, lambda ranks: trained(Topology(ranks), "in turn"))
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_one_hash(ranks: int, place: str, use_orig_params: bool, alone: tuple[str, list[float]]) -> None:
    """Parameters and norms have the bits of one rank, for any number of ranks and any place of a micro-batch."""

    def rank(world: Collectives) -> tuple[str, list[float]]:
        return trained(Topology(world), place, use_orig_params=use_orig_params)

    assert {str(found) for found in run_threads(ranks, rank)} == {str(alone)}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_copies(place: str, shards: int, alone: tuple[str, list[float]]) -> None:
    """Sums over shards and copies are rounded once, too; with whole copies on each rank as well."""

    def rank(world: Collectives) -> tuple[str, list[float]]:
        return trained(rectangle(world, shards), place)

    assert {str(found) for found in run_threads(4, rank)} == {str(alone)}


def test_plain_passes_and_no_sync() -> None:
    """Without `accumulate`, the mean over ranks is exact, after passes without synchronisation, too."""

    def rank(world: Collectives, mine: Sequence[int]) -> str:
        model = shard(Topology(world))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with no_sync(model):
            for number in mine[:-1]:
                model(batches(0)[number][0]).square().mean().backward()
        model(batches(0)[mine[-1]][0]).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            # FSDP1's mean is over ranks: a sum is the same for every number of them.
            parameter.grad *= world.size
        optimizer.step()
        return digest(model)

    spreads = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3, 1], [0, 2]], [[3], [1], [2], [0]]]
    found = [run_threads(len(each), lambda world, each=each: rank(world, each[world.rank])) for each in spreads]
    assert len({digest for digests in found for digest in digests}) == 1


@each_row(("most", "factor"), [(1, 1), (3, 2)], ids=["one", "several"])
def test_bytes(most: int, factor: int) -> None:
    """A rank sends the bytes of a reduce-scatter if each has one micro-batch, and twice as many if one has several."""

    def rank(world: Collectives) -> tuple[ByteLedger, int]:
        ledger = ByteLedger()
        model = shard(Topology(RecordingCollectives(world, ledger)))
        for number in range(most if world.rank else 1):
            with accumulate(model, weight=1):
                model(batches(0)[number][0]).square().mean().backward()
        reduce_gradients(model)
        numel = sum(handle.layout.numel for unit in units_in(model) for handle in unit.handles)
        return ledger, numel

    for ledger, numel in run_threads(2, rank):
        assert ledger.by_op()["all_to_all"].sent_nbytes == factor * numel * 4 // 2
        assert "reduce_scatter" not in ledger.by_op()


def test_gradients_that_are_dropped() -> None:
    """What `zero_grad` drops is in no sum."""

    def rank(world: Collectives) -> tuple[str, str]:
        found = []
        for drops in (False, True):
            model = shard(Topology(world))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(3 if drops else 0):
                with accumulate(model, weight=7):
                    model(batches(1)[number][0]).square().mean().backward()
            optimizer.zero_grad()
            with accumulate(model, weight=2):
                model(batches(0)[world.rank][0]).square().mean().backward()
            reduce_gradients(model)
            optimizer.step()
            found.append(digest(model))
        return found[0], found[1]

    for kept, dropped in run_threads(2, rank):
        assert kept == dropped


@each_row(
    ("program", "words"),
    [
        (
            lambda model: model(torch.ones(1, 5)).sum().backward() or clip_grad_norm_(model, 1.0, 3.0),
            "norm_type 2.0 or",
        ),
        (lambda model: accumulate(model, weight=0.5).__enter__(), "expected a whole number below 2..29"),
        (lambda model: accumulate(model, weight=2.0**41).__enter__(), "expected a whole number below 2..29"),
    ],
)
def test_wrong_programs(program: Callable[[nn.Module], object], words: str) -> None:
    """A norm of another order, and a weight whose sums are not exact, are refused."""

    def rank(world: Collectives) -> None:
        program(shard(Topology(world)))

    with pytest.raises(RankError, match=words):
        run_threads(2, rank)


def test_hooks_are_refused() -> None:
    """A hook in the place of a reduction, and sums over copies that come later, are refused by name."""

    def rank(world: Collectives) -> None:
        model = shard(rectangle(world, 1))
        for unit in units_in(model):
            unit.reducer.sums_copies = False
        with pytest.raises(FlatParamError, match="set_requires_all_reduce"):
            model(torch.ones(1, 5)).sum().backward()

    run_threads(2, rank)


def test_a_narrow_wire() -> None:
    """With a wire of bfloat16 a rank sends half the bytes; the sum of the rounded contributions is rounded once."""

    def rank(world: Collectives, wire: Wire | None, several: bool) -> tuple[int, list[Tensor], list[Tensor]]:
        ledger, model = ByteLedger(), build()
        mine = [world.rank, world.rank + 3][: 2 if several else 1]
        contribution = [torch.zeros_like(each) for each in model.parameters()]
        for number in mine:
            gradients = torch.autograd.grad(model(batches(0)[number][0]).square().mean(), [*model.parameters()])
            contribution = [a + (number + 1) * b.double() for a, b in zip(contribution, gradients, strict=True)]
        plan = UnitPlan(Topology(RecordingCollectives(world, ledger)), use_orig_params=True, sums=ExactSums(wire))
        shard_module(model, plan)
        for number in mine:
            with accumulate(model, weight=number + 1):
                model(batches(0)[number][0]).square().mean().backward()
        reduce_gradients(model)
        with summon_full_params(model, with_grads=True):
            found = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        return ledger.by_op()["all_to_all"].sent_nbytes, found, contribution

    for several in (False, True):
        results = run_threads(3, lambda world, several=several: rank(world, Wire(reduce="bf16"), several))
        as_it_is = run_threads(3, lambda world, several=several: rank(world, None, several))
        total = sum(number + 1 for world in range(3) for number in [world, world + 3][: 2 if several else 1])
        for place in range(len(results[0][1])):
            rounded = [each[2][place].float().bfloat16().double() for each in results]
            wanted = (sum(rounded[1:], rounded[0]) / total).float()
            for (nbytes, found, _), (more, _, _) in zip(results, as_it_is, strict=True):
                torch.testing.assert_close(found[place], wanted, rtol=2**-23, atol=0)
                assert nbytes == more // (4 if several else 2)
            exact = sum((each[2][place] for each in results[1:]), results[0][2][place]) / total
            # Each contribution is off by at most half a unit of its eighth bit.
            bound = sum((each[2][place].abs() for each in results[1:]), results[0][2][place].abs()) / total
            assert bool(((results[0][1][place].double() - exact).abs() <= bound * 2**-8).all())


class Scaled(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).sum()


@each_row("exponents", [[60, 0, -60], [60, 0, -60, -120], [0, -54, -108, -120, 60, 110]])
def test_sums_of_weighted_gradients_of_any_range(exponents: list[int]) -> None:
    """A rank's sum may take more tensors than three; it is the exact one, divided by the weights and rounded once."""

    def rank(world: Collectives) -> Tensor:
        model = Scaled()
        shard_module(model, UnitPlan(Topology(world), sums=ExactSums()))
        for exponent in exponents:
            with accumulate(model, weight=3.0 + world.rank):
                model(torch.full((4,), 1.5 * 2.0**exponent)).backward()
        reduce_gradients(model)
        with summon_full_params(model, with_grads=True):
            assert model.scale.grad is not None
            return model.scale.grad.clone()

    exact = sum(Fraction(3 + rank) * Fraction(1.5 * 2.0**each) for rank in range(2) for each in exponents)
    wanted = float(exact / (7 * len(exponents)))
    for found in run_threads(2, rank):
        assert torch.equal(found, torch.full((4,), wanted))


@each_row("weight", [1.0, 3.0, 2.0**28 - 1, 2.0**29 - 1])
def test_an_exact_tie_is_rounded_to_even_whatever_the_weights(weight: float) -> None:
    """The mean of two gradients of one weight lies in the middle of two float32s, and the sum has more than 53 bits."""
    one, other = float.fromhex("-0x1.672e42p+0"), float.fromhex("0x1.ap-21")
    model = Scaled()
    shard_module(model, UnitPlan(Topology(SingleCollectives()), sums=ExactSums()))
    for value in (one, other):
        with accumulate(model, weight=weight):
            model(torch.full((4,), value)).backward()
    reduce_gradients(model)
    wanted = torch.tensor((one + other) / 2, dtype=torch.float64).float()
    assert wanted.item() == float.fromhex("-0x1.672e34p-1")
    (found,) = (parameter.grad for parameter in model.parameters())
    assert found is not None
    assert torch.equal(found, wanted.expand(4))
