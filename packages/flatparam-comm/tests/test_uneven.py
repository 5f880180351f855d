"""Gathers and sums of shards that differ in length: over engines, with the bytes of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import (
    ByteLedger,
    Collectives,
    CommHooks,
    CompressedCollectives,
    FlatParamError,
    FlatParamHandle,
    Gather,
    HookedCollectives,
    Pending,
    RecordingCollectives,
    Reducer,
    Residency,
    Topology,
    gather_shards,
)
from flatparam_comm.testing import run_processes, run_threads
from flatparam_core import flatten_module

SHARES = (3, 1, 2)


def layer() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(5, 7)


def flattened(group: Collectives, *, shares: tuple[int, ...] = SHARES) -> tuple[nn.Linear, FlatParamHandle]:
    module = layer()
    (handle,) = flatten_module(module, rank=group.rank, world_size=group.size, shares=shares)
    return module, handle


def gathered_and_reduced(group: Collectives) -> Any:
    """The full parameters that a gather shows, this rank's gradient, its place in the flat one, and the bytes."""
    ledger = ByteLedger(keep=True)
    recorded = RecordingCollectives(group, ledger)
    module, handle = flattened(group)
    Gather.issue([handle], recorded, label="layer").finish()
    full = [module.weight.detach().clone(), module.bias.detach().clone()]
    for index, leaf in enumerate(handle.leaves):
        leaf.grad = torch.full_like(leaf, 1.0 + index) * (1 + group.rank)
    handle.deposit_all([0, 1])
    handle.reshard()
    reduction = Reducer(Topology(recorded)).issue([handle], label="layer")
    reduction.replicate()
    (reduced,) = reduction.settle()
    moved = [(each.op, each.payload_nbytes, each.sent_nbytes) for each in ledger.transfers]
    return full, reduced.gradient, handle.layout, moved


@each_row("late", [False, True])
def test_shards_of_different_lengths_are_gathered_and_summed(late: bool) -> None:
    """Every rank sees the full parameters, and gets its own elements of the mean gradient, whenever bytes arrive."""
    found = run_threads(3, gathered_and_reduced, deliver_late=late)
    check(found)


@pytest.mark.processes
def test_shards_of_different_lengths_over_gloo() -> None:
    """The same over process groups."""
    check(run_processes(3, gathered_and_reduced))


def cast(group: Collectives) -> Any:
    return gathered_and_reduced(CompressedCollectives(group, torch.bfloat16))


def hooked(group: Collectives) -> Any:
    def call(inner: Collectives, output: Tensor, given: Tensor, label: str) -> Pending:
        calls.append(label)
        return inner.all_gather(output, given, label=label)

    calls: list[str] = []
    found = gathered_and_reduced(HookedCollectives(group, all_gather=call))
    assert calls == ["layer"]
    return found


@each_row("decorate", [cast, hooked])
def test_what_changes_a_gather_gets_equal_parts(decorate: Any) -> None:
    """A decorator that casts, or calls a function, is not passed by: parts are as long as the longest."""
    for full, _, layout, moved in run_threads(3, decorate):
        torch.testing.assert_close(full[0], layer().weight.detach(), rtol=1e-2, atol=1e-2)
        nbytes = 3 * max(layout.shard_numels) * 4
        assert [each[:2] for each in moved] == [("all_gather", nbytes), ("reduce_scatter", nbytes)]


def check(found: list[Any]) -> None:
    plain = layer()
    mean = torch.cat([torch.full((35,), 2.0), torch.full((7,), 4.0)])
    for rank, (full, gradient, layout, moved) in enumerate(found):
        assert torch.equal(full[0], plain.weight)
        assert torch.equal(full[1], plain.bias)
        assert len({*layout.shard_numels}) == 3
        span = layout.shard_span(rank)
        wanted = torch.nn.functional.pad(mean, (0, layout.numel - mean.numel()))[span.as_slice()]
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=0)
        own, every = 4 * layout.shard_numels[rank], 4 * layout.numel
        assert moved == [("all_to_all", 3 * own, 2 * own), ("all_to_all", every, every - own)]


def test_equal_shares_move_the_flat_parameter_itself() -> None:
    """Without uneven lengths no byte more than the flat parameter is moved, and no buffer is made for it."""

    def program(group: Collectives) -> None:
        ledger = ByteLedger(keep=True)
        _, handle = flattened(group, shares=(2, 2, 2))
        full, shard = handle.begin_unshard()
        recorded = RecordingCollectives(group, ledger)
        gather_shards(recorded, handle.layout, full, shard).wait()
        assert [each.payload_nbytes for each in ledger.transfers] == [handle.layout.numel * 4]
        handle.reshard()

    run_threads(3, program)


def test_hooks_for_equal_parts_are_refused() -> None:
    """A hook in the place of a collective takes equal parts: the error names the parameters and both lengths."""

    def program(group: Collectives) -> None:
        _, handle = flattened(group)
        with pytest.raises(
            FlatParamError, match=r"'weight', ...: the shards have from \d+ to \d+ elements, and the hook"
        ):
            Gather.issue([handle], group, hook=lambda shard, full: None)
        assert handle.residency is Residency.SHARDED
        Gather.issue([handle], group).finish()
        handle.leaves[0].grad = torch.ones_like(handle.leaves[0])
        handle.deposit(0)
        handle.reshard()
        reducer = Reducer(Topology(group), hooks=CommHooks(reduce=lambda full, output: None))
        with pytest.raises(FlatParamError, match="the hook in the place of the reduce-scatter takes equal ones"):
            reducer.issue([handle])

    run_threads(3, program)
