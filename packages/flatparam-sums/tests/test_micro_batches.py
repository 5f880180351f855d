"""Ranks with different numbers of micro-batches, of different weights, have the gradients of one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import ByteLedger, Collectives, RankError, RecordingCollectives
from flatparam_comm.testing import rectangle, run_threads
from flatparam_core import Precision
from flatparam_runtime import (
    EventLog,
    FlatParamError,
    Topology,
    UnitPlan,
    drop_waiting,
    observe,
    shard_module,
    units_in,
)
from flatparam_sums import accumulate, reduce_gradients, uneven_inputs

from .integers import Batch, build, expected, gradients, loss, same, shard, spread

STRATEGIES: dict[str, dict[str, bool]] = {
    "full shard": {},
    "shard grad op": {"free_after_forward": False, "free_after_unsynced_backward": False},
}


def do(model: nn.Module, batches: list[Batch]) -> None:
    """Compute these micro-batches, and reduce."""
    for batch in batches:
        with accumulate(model, weight=batch[1]):
            loss(model, batch).backward()
    reduce_gradients(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_thirty_distributions(ranks: int, strategy: str, use_orig_params: bool) -> None:
    """Any spread of micro-batches has, to the bit, the gradients of one process that does all of them."""
    steps = [spread(seed, ranks) for seed in range(30)]

    def rank(world: Collectives) -> list[dict[str, Tensor | None]]:
        model = shard(world, use_orig_params=use_orig_params, **STRATEGIES[strategy])
        found = []
        for batches in steps:
            do(model, [*batches[world.rank]])
            found.append(gradients(model))
            model.zero_grad()
        return found

    for found in run_threads(ranks, rank):
        for step, mine in zip(steps, found, strict=True):
            same(mine, expected(step))


def test_hybrid() -> None:
    """Copies of shards do different numbers of micro-batches, too, each group of ranks by itself."""
    steps = [spread(seed, 4) for seed in range(12)]

    def rank(world: Collectives) -> list[dict[str, Tensor | None]]:
        topology = rectangle(world, 2)
        model, found = shard(topology), []
        for batches in steps:
            do(model, [*batches[topology.rank]])
            found.append(gradients(model))
            model.zero_grad()
        return found

    for found in run_threads(4, rank):
        for step, mine in zip(steps, found, strict=True):
            same(mine, expected(step))


def test_nothing_is_sharded() -> None:
    """Where each rank has everything, nobody gathers for others, and the mean is the same."""
    step = spread(3, 2)

    def rank(world: Collectives) -> dict[str, Tensor | None]:
        model = shard(rectangle(world, 1))
        do(model, [*step[world.rank]])
        return gradients(model)

    for found in run_threads(2, rank):
        same(found, expected(step))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_that_borrows(strategy: str) -> None:
    """A unit with a weight of another one, and a bias of its own, is gathered for others as it is to compute."""

    def tied() -> nn.Sequential:
        model = build()
        model[2].up.weight = model[1].up.weight
        return model

    def rank(world: Collectives) -> dict[str, Tensor | None]:
        model = tied()
        for module in (model[1], model[2], model):
            shard_module(module, UnitPlan(Topology(world), **STRATEGIES[strategy]))  # type: ignore[arg-type]
        for _ in range(2):
            model.zero_grad()
            do(model, [(torch.ones(1, 2), 1)] * (1 + world.rank))
        return gradients(model)

    alone = tied()
    loss(alone, (torch.ones(1, 2), 1)).backward()
    for found in run_threads(2, rank):
        same(found, {name: each.grad for name, each in alone.named_parameters()})


def calls(ledger: ByteLedger, *, op: str, label: str | None = None) -> int:
    """Return how many calls of `op` there were."""
    return sum(1 for each in ledger.transfers if each.op == op and label in (None, each.label))


@each_row("strategy", STRATEGIES)
def test_the_collectives_of_a_step(strategy: str) -> None:
    """A step reduces each unit once, whatever the counts; with SHARD_GRAD_OP it gathers each once. All tell 8 bytes."""

    def rank(world: Collectives) -> tuple[ByteLedger, int]:
        ledger = ByteLedger(keep=True)
        model = shard(RecordingCollectives(world, ledger), **STRATEGIES[strategy])
        # The first steps record what is gathered.
        for _ in range(2):
            do(model, [(torch.ones(1, 2), 1)] * (3 if world.rank else 0))
        ledger.reset()
        counts = (5, 2, 0)
        do(model, [(torch.ones(1, 2), 1)] * counts[world.rank])
        return ledger, counts[world.rank]

    for ledger, _ in run_threads(3, rank):
        assert calls(ledger, op="reduce_scatter") == 3
        # Nobody waits for what says that a micro-batch begins; all wait for the last one.
        told = [each for each in ledger.transfers if each.label == "micro-batches"]
        assert {each.payload_nbytes for each in told} == {3 * 8}
        gathers = [calls(ledger, op="all_gather", label=name) for name in ("(root)", "1", "2")]
        if strategy == "full shard":
            assert gathers == [5, 10, 10]  # the root stays for its backward
            assert len(told) == 5 + 1
        else:
            assert gathers == [1, 1, 1]
            assert len(told) == 1 + 1


def test_equal_work_tells_nothing() -> None:
    """Without weights, ranks tell each other nothing, and the gradient is the mean over all micro-batches."""
    step = [[(torch.full((1, 2), float(rank + i)), 1) for i in range(4)] for rank in range(2)]

    def rank(world: Collectives) -> tuple[dict[str, Tensor | None], int]:
        ledger = ByteLedger(keep=True)
        model = shard(RecordingCollectives(world, ledger))
        for batch in step[world.rank]:
            with accumulate(model):
                loss(model, batch).backward()
        reduce_gradients(model)
        return gradients(model), sum(1 for each in ledger.transfers if each.label == "micro-batches")

    for found, told in run_threads(2, rank):
        same(found, expected(step))
        assert told == 0


def test_a_rank_that_follows_has_one_unit_at_a_time() -> None:
    """A rank without micro-batches frees each unit before it gathers the next one."""

    def rank(world: Collectives) -> list[str]:
        model, log = shard(world), EventLog()
        for _ in range(2):
            log.events.clear()
            with observe(model, log):
                do(model, [] if world.rank else [(torch.ones(1, 2), 1)] * 2)
        return log.lines()

    _, followed = run_threads(2, rank)
    gathers = [line for line in followed if line.startswith(("unshard", "reshard"))]
    assert len(gathers) == 2 * 2 * 5
    for first, second in zip(gathers[::2], gathers[1::2], strict=True):
        assert first.replace("unshard", "reshard") == second


@each_row("ranks", [2, 3])
def test_data_that_end_earlier(ranks: int) -> None:
    """A rank whose data have ended serves the others, and steps with them, until all have ended."""
    lengths = [2, 7, 0][:ranks]
    steps = [
        [[(torch.full((1, 2), float(rank + i)), rank + 1)] if i < lengths[rank] else [] for rank in range(ranks)]
        for i in range(max(lengths))
    ]

    def rank(world: Collectives) -> list[dict[str, Tensor | None]]:
        model, found = shard(world), []

        def step() -> None:
            found.append(gradients(model))
            model.zero_grad()

        with uneven_inputs(model, step):
            for batches in steps[: lengths[world.rank]]:
                for batch in batches[world.rank]:
                    with accumulate(model, weight=batch[1]):
                        loss(model, batch).backward()
                reduce_gradients(model)
                step()
        return found

    for found in run_threads(ranks, rank):
        assert len(found) == max(lengths)
        for batches, mine in zip(steps, found, strict=True):
            same(mine, expected(batches))


def test_float16_does_not_overflow() -> None:
    """Weights of a million tokens leave sums in float16 in range: the gradient is that with weights a million smaller."""

    def rank(world: Collectives) -> list[dict[str, Tensor | None]]:
        found = []
        for scale in (1, 2**20):
            model = shard(world, precision=Precision(reduce_dtype=torch.float16))
            do(model, [(torch.ones(1, 2) * 4, scale * (1 + world.rank))] * 3)
            found.append(gradients(model))
        return found

    for small, large in run_threads(2, rank):
        same(large, small)
        assert all(value is not None and bool(value.isfinite().all()) for value in large.values())
        assert any(value is not None and float(value.abs().max()) > 1 for value in large.values())


def test_gradients_are_added_to_those_that_are_there() -> None:
    """A second step without `zero_grad` adds its mean to the first one's."""

    def rank(world: Collectives) -> dict[str, Tensor | None]:
        model = shard(world)
        for _ in range(2):
            do(model, [(torch.ones(1, 2), 2)])
        return gradients(model)

    wanted = expected([[(torch.ones(1, 2), 2)]])
    for found in run_threads(2, rank):
        same(found, {name: None if value is None else value * 2 for name, value in wanted.items()})


def test_dropped_micro_batches_do_not_count() -> None:
    """What `zero_grad` drops before the reduction has no weight in it either."""
    step = [[(torch.ones(1, 2), 2)], [(torch.ones(1, 2) * 3, 4)]]

    def rank(world: Collectives) -> dict[str, Tensor | None]:
        model = shard(world)
        with accumulate(model, weight=100):
            loss(model, (torch.ones(1, 2), 1)).backward()
        drop_waiting(units_in(model))
        do(model, [*step[world.rank]])
        return gradients(model)

    for found in run_threads(2, rank):
        same(found, expected(step))


def test_an_exception_drops_what_was_collected() -> None:
    """A micro-batch that raises after its backward pass counts nothing, and neither do those before it in the step."""
    step = [[(torch.ones(1, 2), 2)], [(torch.ones(1, 2) * 3, 4)]]

    def rank(world: Collectives) -> dict[str, Tensor | None]:
        model = shard(world)
        do(model, [(torch.ones(1, 2), 1)])
        model.zero_grad()
        for fails in (False, True):
            with contextlib.suppress(KeyError), accumulate(model, weight=100):
                loss(model, (torch.ones(1, 2), 1)).backward()
                if fails:
                    raise KeyError("a wrong batch")
        do(model, [*step[world.rank]])
        return gradients(model)

    for found in run_threads(2, rank):
        same(found, expected(step))


def test_a_weight_in_a_tensor() -> None:
    """The number of tokens may be a tensor of one element, as a sum over a mask is."""
    step = [[(torch.ones(1, 2), 2)], [(torch.ones(1, 2) * 3, 4)]]

    def rank(world: Collectives) -> dict[str, Tensor | None]:
        model = shard(world)
        for batch in step[world.rank]:
            with accumulate(model, weight=torch.ones(batch[1]).sum()):
                loss(model, batch).backward()
        reduce_gradients(model)
        return gradients(model)

    for found in run_threads(2, rank):
        same(found, expected(step))


def test_a_copy_begins_anew() -> None:
    """A deep copy of a model that has accumulated trains by itself."""
    step = [[(torch.ones(1, 2), 2)], []]

    def rank(world: Collectives) -> dict[str, Tensor | None]:
        model = shard(world)
        do(model, [*step[world.rank]])
        other = copy.deepcopy(model)
        other.zero_grad()
        do(other, [*step[world.rank]])
        return gradients(other)

    for found in run_threads(2, rank):
        same(found, expected(step))


# Programs that are wrong


def backward_inside(model: nn.Module, weight: Any = 1) -> None:
    """One micro-batch."""
    with accumulate(model, weight=weight):
        loss(model, (torch.ones(1, 2), 1)).backward()


def nested(model: nn.Module) -> None:
    with accumulate(model), accumulate(model):
        pass


def reduced_inside(model: nn.Module) -> None:
    with accumulate(model):
        reduce_gradients(model)


def mixed(model: nn.Module) -> None:
    backward_inside(model, 2)
    backward_inside(model, None)


def not_reduced(model: nn.Module) -> None:
    backward_inside(model)
    loss(model, (torch.ones(1, 2), 1)).backward()


def divided(model: nn.Module) -> None:
    for unit in units_in(model):
        unit.reducer.divide_factor = 2.0
    backward_inside(model)


def ended_too_early(model: nn.Module) -> None:
    with uneven_inputs(model, lambda: None):
        backward_inside(model)


@each_row(
    ("program", "words"),
    [
        (nested, "expected accumulate.. after the last one has ended"),
        (reduced_inside, "expected reduce_gradients.. after accumulate"),
        (mixed, "a weight for each micro-batch of a step, or for none"),
        (not_reduced, "expected reduce_gradients.. after the micro-batches"),
        (divided, "a divisor that set_gradient_divide_factor has set"),
        (ended_too_early, "expected reduce_gradients.. after the last micro-batch"),
        (lambda model: reduce_gradients(model[1]), "expected the outermost unit"),
        (lambda model: reduce_gradients(nn.Linear(1, 1)), "expected a sharded module, found Linear"),
        (lambda model: backward_inside(model, -1), "expected a weight of at least 0, found -1"),
        (lambda model: backward_inside(model, float("inf")), "expected a weight of at least 0, found inf"),
        (lambda model: backward_inside(model, True), "expected a weight of at least 0, found True"),
        (lambda model: uneven_inputs(model, None).__enter__(), "expected a function to call"),  # type: ignore[arg-type]
    ],
)
def test_wrong_programs(program: Callable[[nn.Module], None], words: str) -> None:
    """Each is refused on every rank, in words that say what to do."""

    def rank(world: Collectives) -> str:
        model = shard(world)
        backward_inside(model)
        reduce_gradients(model)
        with pytest.raises((FlatParamError, ValueError, TypeError), match=words) as caught:
            program(model)
        return str(caught.value)

    assert all(run_threads(2, rank))


def test_other_ranks_and_buffers() -> None:
    """Units over different ranks, and buffers that each pass broadcasts, are refused by name."""

    def rank(world: Collectives) -> None:
        model = build()
        pair = rectangle(world, 1)
        shard_module(model[1], UnitPlan(pair))
        shard_module(model, UnitPlan(Topology(world)))
        with pytest.raises(FlatParamError, match="unit '1', rank .: expected all units over the same ranks"):
            backward_inside(model)
        model = build()
        shard_module(model, UnitPlan(Topology(world), broadcast_buffers=True))
        with pytest.raises(FlatParamError, match="no buffers to broadcast"):
            backward_inside(model)

    run_threads(2, rank)


class Fork(nn.Module):
    """Calls one of its two blocks."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks
        self.second = False

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) if not self.second else self.blocks[1](x)


@each_row("recorded", [False, True])
def test_micro_batches_that_differ(recorded: bool) -> None:
    """A micro-batch that gathers other units than the first one, or than another rank's, is an error on all ranks."""

    def rank(world: Collectives) -> None:
        model = Fork(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        for module in (*model.blocks, model):
            shard_module(module, UnitPlan(Topology(world)))
        for _ in range(2 if recorded else 0):
            do(model, [(torch.ones(1, 2), 1)])
        model.second = bool(recorded or world.rank)
        do(model, [(torch.ones(1, 2), 1)])

    words = "a micro-batch gathers unit 'blocks.1' after" if recorded else "gather different units"
    with pytest.raises(RankError, match=words):
        run_threads(2, rank)


def test_a_rank_that_fails_in_a_micro_batch() -> None:
    """Its exception reaches the ranks that follow, which wait for it."""

    def rank(world: Collectives) -> None:
        model = shard(world)
        do(model, [(torch.ones(1, 2), 1)])
        if world.rank == 0:
            with accumulate(model, weight=1):
                raise KeyError("a wrong batch")
        reduce_gradients(model)

    with pytest.raises(RankError, match="rank 0 of 2 failed with KeyError"):
        run_threads(2, rank)
