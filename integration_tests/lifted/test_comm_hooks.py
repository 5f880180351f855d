"""Communication hooks, and what is reduced when: rows L-29, L-35 and L-50 of the specification."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from each_row import each_row
from torch import Tensor, nn

from flatparam import ShardingStrategy
from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, run_threads
from integration_tests.lifted.our_half import (
    FSDP,
    assert_trains_as_one,
    blocks,
    full_gradients,
    give_gradients,
    gradient_of,
    hybrid,
    square_loss,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.runs import assert_same_tensors, gradients_of

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def torch_hybrid(group: Collectives) -> nn.Module:
    """One shard group of both ranks, of which there is one copy."""
    alone = [dist.new_group([rank]) for rank in range(2)][group.rank]
    strategy = dist.fsdp.ShardingStrategy.HYBRID_SHARD
    return fsdp1(nn.Linear(4, 4), process_group=(dist.group.WORLD, alone), sharding_strategy=strategy)


def torch_below_a_root() -> Any:
    """A wrapper inside another one, after a step."""
    model = fsdp1(nn.Sequential(fsdp1(nn.Linear(4, 4)), nn.Linear(4, 4)))
    model(torch.ones(1, 4)).sum().backward()
    return model.module[0]


def torch_l29_hybrid(group: Collectives) -> None:
    torch_hybrid(group).register_comm_hook(None, print)


def torch_l29_twice(group: Collectives) -> None:
    model = fsdp1(nn.Linear(4, 4))
    model.register_comm_hook(None, print)
    model.register_comm_hook(None, print)


def torch_l29_none(group: Collectives) -> None:
    fsdp1(nn.Linear(4, 4)).register_comm_hook(None, None)


def torch_l35_no_sync(group: Collectives) -> None:
    with torch_below_a_root().no_sync():
        pass


def torch_l35_hook(group: Collectives) -> None:
    torch_below_a_root().register_comm_hook(None, print)


def torch_l50(group: Collectives) -> list[Any]:
    model = torch_hybrid(group)
    with unittest.mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as all_reduce:
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
    methods = ("set_requires_all_reduce", "set_gradient_divide_factor")
    return [all_reduce.call_count, *(hasattr(model, method) for method in methods)]


def test_l29_torch_has_one_hook_and_none_for_hybrid(processes: Outcomes) -> None:
    """Torch refuses a hook for HYBRID_SHARD, a second one, and None to take it away."""
    processes.assert_raised(torch_l29_hybrid, "AssertionError", "not supported for hybrid strategies")
    processes.assert_raised(torch_l29_twice, "AssertionError", "already registered")
    processes.assert_raised(torch_l29_none, "ValueError", "must be callable")


class Calls:
    """Hooks that do what they stand for, over a group, and count how often."""

    def __init__(self) -> None:
        self.count = 0

    def reduce(self, group: Collectives, full: Tensor, shard: Tensor | None = None) -> None:
        self.count += 1
        if shard is None:
            group.all_reduce(full).wait()
            full.div_(group.size)
        else:
            group.reduce_scatter(shard, full).wait()
            shard.div_(group.size)

    def all_gather(self, group: Collectives, shard: Tensor, full: Tensor) -> None:
        self.count += 1
        group.all_gather(full, shard).wait()


def arguments(strategy: str, group: Collectives) -> dict[str, Any]:
    """For a wrapper of this strategy, with its ranks."""
    where = hybrid(group) if "HYBRID" in strategy else group
    return {"process_group": where, "sharding_strategy": ShardingStrategy[strategy]}


def hooked(
    model: nn.Module, group: Collectives, strategy: str, register: Callable[[Any, Collectives, Any], None]
) -> nn.Module:
    """The blocks wrapped, with hooks over their shard group."""
    more = arguments(strategy, group)
    for name in ("0", "1"):
        model._modules[name] = FSDP(model._modules[name], **more)
    made = FSDP(model, **more)
    where = more["process_group"]
    shard, copies = where if isinstance(where, tuple) else (where, None)
    register(made, shard, copies)
    return made


@each_row("strategy", STRATEGIES)
def test_l29_a_hook_for_the_reduction_in_every_strategy(strategy: str) -> None:
    """A hook that reduces as the collective does trains to the same bits, and is called for every unit and step."""
    of_ranks = []

    def register(model: Any, shard: Collectives, copies: Any) -> None:
        of_ranks.append(calls := Calls())
        model.register_comm_hook(shard, calls.reduce)

    ranks = 4 if "HYBRID" in strategy else 2
    assert_trains_as_one(blocks, lambda model, group: hooked(model, group, strategy, register), ranks)
    assert [calls.count for calls in of_ranks] == [3 * 3] * ranks


@each_row("strategy", STRATEGIES[:2] + STRATEGIES[3:])
def test_l29_a_hook_for_the_gather(strategy: str) -> None:
    """A hook that gathers as the collective does trains to the same bits."""
    of_ranks = []

    def register(model: Any, shard: Collectives, copies: Any) -> None:
        of_ranks.append(calls := Calls())
        model.register_comm_hook(shard, calls.all_gather, stage="all_gather")

    ranks = 4 if "HYBRID" in strategy else 2
    assert_trains_as_one(blocks, lambda model, group: hooked(model, group, strategy, register), ranks)
    assert all(calls.count >= 3 * 3 for calls in of_ranks)


@each_row("with_reduce", [False, True], ids=["alone", "beside one that reduces"])
def test_l29_a_hook_for_the_copies_of_a_shard(with_reduce: bool) -> None:
    """A hook that averages over the copies of a shard trains to the same bits, alone and beside one that reduces."""

    def register(model: Any, shard: Collectives, copies: Any) -> None:
        model.register_comm_hook(copies, Calls().reduce, stage="all_reduce")
        if with_reduce:
            model.register_comm_hook(shard, Calls().reduce)

    assert_trains_as_one(blocks, lambda model, group: hooked(model, group, "HYBRID_SHARD", register), 4)


def test_l29_hooks_are_replaced_and_taken_away() -> None:
    """None brings the collective back, and another hook can be registered then; the numbers stay the same."""

    def rank(group: Collectives) -> tuple[list[int], list[Any]]:
        first, second = Calls(), Calls()
        model = hooked(blocks(), group, "FULL_SHARD", lambda *given: None)
        counts, gradients = [], []
        for hook in (None, first.reduce, second.reduce, None):
            model.register_comm_hook(group, None)
            model.register_comm_hook(group, hook)
            model.zero_grad()
            square_loss(model, 0, group.rank).backward()
            counts += [first.count, second.count]
            gradients.append(full_gradients(model))
        return counts, gradients

    for counts, (before, *after) in run_threads(2, rank):
        assert counts == [0, 0, 3, 0, 3, 3, 3, 3]
        for gradients in after:
            assert_same_tensors(gradients, before, "gradient")


def test_l35_torch_hooks_and_no_sync_at_the_root_only(processes: Outcomes) -> None:
    """Torch refuses no_sync and a hook on a wrapper that is not the root."""
    processes.assert_raised(torch_l35_no_sync, "RuntimeError", "on inner FSDP instances is not supported")
    processes.assert_raised(torch_l35_hook, "AssertionError", "only be called on a root instance")


def test_l35_a_hook_for_one_unit() -> None:
    """A hook of a unit below the root is called for that unit alone, and the training has the same bits."""
    of_ranks = []

    def register(model: Any, shard: Collectives, copies: Any) -> None:
        of_ranks.append(calls := Calls())
        model.module[1].register_comm_hook(shard, calls.reduce)

    assert_trains_as_one(blocks, lambda model, group: hooked(model, group, "FULL_SHARD", register))
    assert [calls.count for calls in of_ranks] == [3, 3]


@each_row("strategy", STRATEGIES[:3])
def test_l35_no_sync_of_one_unit(strategy: str) -> None:
    """Inside a unit's own no_sync the other units are reduced, and the next pass reduces what that unit collected."""

    def rank(group: Collectives) -> tuple[dict[str, int], Any]:
        ledger = ByteLedger()
        model: Any = hooked(blocks(), RecordingCollectives(group, ledger), strategy, lambda *given: None)
        square_loss(model, 0, group.rank).backward()
        model.zero_grad()
        ledger.reset()
        with model.module[0].no_sync():
            square_loss(model, 0, group.rank).backward()
        counts = {op: totals.count for op, totals in ledger.by_op().items()}
        square_loss(model, 1, group.rank).backward()
        return counts, full_gradients(model)

    model = blocks()
    together = [gradient_of(model, [0, 1], rank) for rank in range(2)]
    give_gradients(model, together)
    collected = gradients_of(model)
    apart = []
    for step in range(2):
        give_gradients(model, [gradient_of(model, [step], rank) for rank in range(2)])
        apart.append(gradients_of(model))
    expected = {
        name: collected[name] if name.startswith("0.") else apart[0][name] + apart[1][name] for name in collected
    }
    reduction = "all_reduce" if strategy == "NO_SHARD" else "reduce_scatter"
    for counts, gradients in run_threads(2, rank):
        assert counts[reduction] - (reduction == "all_reduce") == 2, "two of three units; the ranks compare too"
        assert_same_tensors(gradients, expected, "gradient")


def test_l50_torch_sums_over_copies_in_every_micro_batch(processes: Outcomes) -> None:
    """Torch all-reduces in both micro-batches of HYBRID_SHARD, and has neither of FSDP2's two methods."""
    assert processes.values(torch_l50) == [[2, False, False]] * 2


def counted(group: Collectives) -> tuple[dict[str, Any], ByteLedger]:
    """Arguments for HYBRID_SHARD on four ranks, and the ledger of what goes between copies."""
    shard, copies = hybrid(group)
    ledger = ByteLedger()
    where = (shard, RecordingCollectives(copies, ledger))
    return {"process_group": where, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}, ledger


def sums(ledger: ByteLedger) -> int:
    """How many gradients were summed over copies; the ranks' comparison has a label of its own."""
    return sum(totals.count for label, totals in ledger.by_label().items() if "gradient" not in label)


def test_l50_copies_are_summed_once_for_many_micro_batches() -> None:
    """With set_requires_all_reduce only the last micro-batch crosses between copies; the mean has the same bits."""

    def rank(group: Collectives) -> tuple[list[int], Any]:
        more, ledger = counted(group)
        model: Any = blocks()
        model[0] = FSDP(model[0], **more)
        model = FSDP(model, **more)
        counts = []
        for step, last in ((0, False), (1, True)):
            model.set_requires_all_reduce(last)
            square_loss(model, step, group.rank).backward()
            counts.append(sums(ledger))
        return counts, full_gradients(model)

    model = blocks()
    of_ranks = [[gradient_of(model, [step], rank) for rank in range(4)] for step in (1, 0)]
    # Inside a pair each micro-batch is summed by itself, and the sums are added up.
    ordered = [of_ranks[step][pair + rank] for pair in (0, 2) for step in (0, 1) for rank in (0, 1)]
    give_gradients(model, ordered, divide=4)
    for counts, gradients in run_threads(4, rank):
        assert counts == [0, 2]
        assert_same_tensors(gradients, gradients_of(model), "gradient")


@each_row("factor", [1.0, 8.0])
@each_row("ranks", [2, 4])
def test_l50_another_divisor(factor: float, ranks: int) -> None:
    """The sum of the ranks' gradients is divided by the factor that the user sets, in a hybrid of four ranks too."""

    def rank(group: Collectives) -> Any:
        more = counted(group)[0] if ranks == 4 else {}
        model: Any = blocks()
        model[0] = FSDP(model[0], **more)
        model = FSDP(model, **more)
        model.set_gradient_divide_factor(factor)
        square_loss(model, 0, group.rank).backward()
        return full_gradients(model)

    model = blocks()
    give_gradients(model, [gradient_of(model, [0], rank) for rank in range(ranks)], divide=factor)
    for gradients in run_threads(ranks, rank):
        assert_same_tensors(gradients, gradients_of(model), "gradient")
