"""Accumulation: gradients are collected, and reduced once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, Residency, SingleCollectives
from flatparam_runtime import EventLog, no_sync, observe, unit_of, units_in

from .models import Branches, Stack, batch
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    full_gradients,
    mean_gradients,
    run,
    seeded,
    sharded,
    zero_gradients,
)

BLOCKS = ["blocks.0", "blocks.1"]


def loss(module: nn.Module, rank: int, step: int = 0) -> Tensor:
    out: Tensor = module(batch(rank, step, near=module)).square().mean()
    return out


def accumulated(make: type[nn.Module], ranks: int, steps: int, device: torch.device | str | None = None) -> Grads:
    """Each rank's gradients added up over the steps, as one reduction then sums them over ranks."""
    found: Grads = {}
    for rank in range(ranks):
        local = seeded(make, device)
        for number in range(steps):
            (loss(local, rank, number) / ranks).backward()
        for name, parameter in local.named_parameters():
            before, part = found.get(name), parameter.grad
            found[name] = part if before is None else before + part
    return found


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_sum_is_reduced_once(
    steps: int, ranks: int, use_orig_params: bool, free_after_forward: bool, device: torch.device
) -> None:
    """Backwards inside ``no_sync`` move no gradient between ranks; the first one outside reduces the sum, once."""

    def train(collectives: Collectives) -> Grads:
        ledger = ByteLedger()
        recording = RecordingCollectives(collectives, ledger)
        module = sharded(
            Stack,
            recording,
            units=BLOCKS,
            device=device,
            use_orig_params=use_orig_params,
            free_after_forward=free_after_forward,
            free_after_unsynced_backward=free_after_forward,
        )
        with no_sync(module):
            for number in range(steps - 1):
                loss(module, collectives.rank, number).backward()
                assert all(parameter.grad is None for parameter in module.parameters())
        assert "reduce_scatter" not in ledger.by_op()
        assert "all_reduce" not in ledger.by_op()
        loss(module, collectives.rank, steps - 1).backward()
        assert ledger.by_op()["reduce_scatter"].count == 3
        check_at_rest(module)
        return full_gradients(module)

    expected = accumulated(Stack, ranks, steps, device)
    for found in run(ranks, train):
        check_same(found, expected)


def test_what_an_unsynced_backward_leaves(free_after_forward: bool) -> None:
    """After an unsynced backward the plan says whether full parameters stay; the next forward then gathers nothing."""
    ledger = ByteLedger()
    module = sharded(
        Stack,
        RecordingCollectives(SingleCollectives(), ledger),
        units=BLOCKS,
        free_after_forward=free_after_forward,
        free_after_unsynced_backward=free_after_forward,
    )
    with no_sync(module):
        loss(module, 0).backward()
        wanted = Residency.SHARDED if free_after_forward else Residency.UNSHARDED
        assert {unit.residency for unit in units_in(module)} == {wanted}
        ledger.reset()
        loss(module, 0, 1).backward()
    gathers = ledger.by_op()["all_gather"].count if "all_gather" in ledger.by_op() else 0
    assert gathers == (5 if free_after_forward else 0)
    # The pass that reduces uses them, too.
    ledger.reset()
    last = loss(module, 0, 2)
    assert ("all_gather" in ledger.by_op()) == free_after_forward
    last.backward()
    check_at_rest(module)


@pytest.mark.parametrize("order", ["all forward passes first", "one ahead"])
def test_forward_passes_that_run_ahead(order: str, free_after_forward: bool, use_orig_params: bool) -> None:
    """Backward passes may come later, as in a pipeline: a plan that keeps gathers once, and gradients add up."""

    def train(collectives: Collectives) -> Grads:
        ledger = ByteLedger()
        module = sharded(
            Stack,
            RecordingCollectives(collectives, ledger),
            units=BLOCKS,
            use_orig_params=use_orig_params,
            free_after_forward=free_after_forward,
            free_after_unsynced_backward=free_after_forward,
        )
        with no_sync(module):
            losses = [loss(module, collectives.rank, 0)]
            for number in range(1, 3):
                losses.append(loss(module, collectives.rank, number))
                if order == "one ahead":
                    losses.pop(0).backward()
            for each in losses:
                each.backward()
        if not free_after_forward:
            assert ledger.by_op()["all_gather"].count == 3
        loss(module, collectives.rank, 3).backward()
        assert ledger.by_op()["reduce_scatter"].count == 3
        check_at_rest(module)
        return full_gradients(module)

    expected = accumulated(Stack, 2, 4)
    for found in run(2, train):
        check_same(found, expected)


def test_contexts_nest(ranks: int) -> None:
    """An inner ``no_sync`` ends with nothing changed for the outer one."""

    def train(collectives: Collectives) -> Grads:
        module = sharded(Stack, collectives, units=BLOCKS)
        with no_sync(module):
            with no_sync(module):
                loss(module, collectives.rank, 0).backward()
            assert not any(unit.reducer.synchronises for unit in units_in(module))
            loss(module, collectives.rank, 1).backward()
            assert all(parameter.grad is None for parameter in module.parameters())
        assert all(unit.reducer.synchronises for unit in units_in(module))
        loss(module, collectives.rank, 2).backward()
        return full_gradients(module)

    expected = accumulated(Stack, ranks, 3)
    for found in run(ranks, train):
        check_same(found, expected)


def test_the_context_ends_with_an_exception() -> None:
    """An exception inside turns synchronisation on again."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    with pytest.raises(ZeroDivisionError), no_sync(module):
        raise ZeroDivisionError
    assert all(unit.reducer.synchronises for unit in units_in(module))


def test_one_unit_may_wait_alone(ranks: int, free_after_forward: bool) -> None:
    """``no_sync`` of one unit holds back only its gradients; a later backward without it brings them."""

    def train(collectives: Collectives) -> tuple[Grads, Grads]:
        module = sharded(
            Stack,
            collectives,
            units=BLOCKS,
            use_orig_params=True,
            free_after_forward=free_after_forward,
            free_after_unsynced_backward=free_after_forward,
        )
        with no_sync(module.blocks[0]):
            loss(module, collectives.rank, 0).backward()
        first = full_gradients(module)
        zero_gradients(module)
        loss(module, collectives.rank, 1).backward()
        check_at_rest(module)
        return first, full_gradients(module)

    one = accumulated(Stack, ranks, 1)
    both = accumulated(Stack, ranks, 2)
    local = seeded(Stack)
    second = mean_gradients(local, lambda m, r: loss(m, r, 1), ranks)
    for first, later in run(ranks, train):
        held = {name for name in one if name.startswith("blocks.0.")}
        assert all(first[name] is None for name in held)
        check_same({n: g for n, g in first.items() if n not in held}, {n: g for n, g in one.items() if n not in held})
        check_same({n: later[n] for n in held}, {n: both[n] for n in held})
        check_same(
            {n: g for n, g in later.items() if n not in held},
            {n: g for n, g in second.items() if n not in held},
        )


def test_a_unit_that_the_last_backward_does_not_use(ranks: int) -> None:
    """Gradients collected in ``no_sync`` are reduced by the next synced backward, even if it does not reach the unit."""

    def ways(module: nn.Module, rank: int, way: str) -> Tensor:
        out: Tensor = module(batch(rank), way).square().mean()
        return out

    def train(collectives: Collectives) -> Grads:
        module = sharded(Branches, collectives, units=["left", "right"])
        with no_sync(module):
            ways(module, collectives.rank, "l").backward()
        ways(module, collectives.rank, "r").backward()
        check_at_rest(module)
        return full_gradients(module)

    left = mean_gradients(seeded(Branches), lambda m, r: ways(m, r, "l"), ranks)
    right = mean_gradients(seeded(Branches), lambda m, r: ways(m, r, "r"), ranks)
    for found in run(ranks, train):
        check_same(
            {n: found[n] for n in found if n != "scale"},
            {n: left[n] if left[n] is not None else right[n] for n in found if n != "scale"},
        )
        first, second = left["scale"], right["scale"]
        assert first is not None
        assert second is not None
        torch.testing.assert_close(found["scale"], first + second)


def test_a_forward_inside_and_its_backward_outside(ranks: int) -> None:
    """Only the place of the backward counts: a forward inside ``no_sync`` with its backward outside is reduced."""

    def train(collectives: Collectives) -> Grads:
        module = sharded(Stack, collectives, units=BLOCKS)
        with no_sync(module):
            total = loss(module, collectives.rank)
        total.backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = accumulated(Stack, ranks, 1)
    for found in run(ranks, train):
        check_same(found, expected)


def test_stepping_after_an_unsynced_backward(free_after_forward: bool) -> None:
    """Parameters that were changed after an unsynced backward are gathered anew: no forward computes with old ones."""
    module = sharded(
        Stack,
        SingleCollectives(),
        units=BLOCKS,
        free_after_forward=free_after_forward,
        free_after_unsynced_backward=free_after_forward,
    )
    # An optimizer holds them in the same way.
    held = list(module.parameters())
    with no_sync(module):
        loss(module, 0).backward()
    with torch.no_grad():
        for parameter in held:
            parameter.mul_(0.5)
    local = seeded(Stack)
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.mul_(0.5)
    assert torch.equal(module(batch()), local(batch()))


def test_an_unsynced_schedule() -> None:
    """Inside ``no_sync`` a unit is gathered and freed as ever, and nothing is reduced."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    log = EventLog()
    with no_sync(module), observe(module, log):
        loss(module, 0).backward()
    kinds = {event.kind for event in log.events}
    assert kinds == {"unshard", "use", "reshard"}
    block = unit_of(module.blocks[0])
    assert block is not None
    assert block.residency is Residency.SHARDED
    assert block.handles[0].gradients.buffer.is_allocated
