"""When full parameters are in memory: settings that may change between passes, and gathers that a caller asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatparam_comm import Collectives, Residency, SingleCollectives
from flatparam_runtime import Casting, EventLog, clip_gradients_, observe, unit_of, units_in

from .models import WIDTH, Stack, batch
from .worlds import check_at_rest, check_same, full_gradients, mean_gradients, run, seeded, sharded

BLOCKS = ["blocks.0", "blocks.1"]


def loss(module: nn.Module, rank: int) -> torch.Tensor:
    out: torch.Tensor = module(batch(rank, near=module)).square().mean()
    return out


@pytest.mark.parametrize("keeps", [True, False])
def test_the_outermost_unit_frees_if_it_is_told_to(keeps: bool, use_orig_params: bool) -> None:
    """Without `keeps_outermost` the root is freed after its forward, and gathered again; gradients stay the same."""

    def rank(ranks: Collectives) -> Any:
        module = sharded(Stack, ranks, units=BLOCKS, keeps_outermost=keeps, use_orig_params=use_orig_params)
        output = loss(module, ranks.rank)
        root = units_in(module)[0]
        assert root.residency is (Residency.UNSHARDED if keeps else Residency.SHARDED)
        output.backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), loss, 2)
    for found in run(2, rank):
        check_same(found, expected)


def test_settings_change_from_the_next_pass_on() -> None:
    """`change_freeing` keeps the full parameters of a unit after its forward that were freed before."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    block = units_in(module)[1]
    loss(module, 0).backward()
    block.change_plan(free_after_forward=False)
    output = loss(module, 0)
    assert block.residency is Residency.UNSHARDED
    output.backward()
    check_at_rest(module)


def kinds(log: EventLog, unit: Any) -> list[str]:
    return [event.kind for event in log.events if event.unit == unit.name]


def test_a_pass_uses_what_a_caller_gathered() -> None:
    """After `hold` the next forward gathers nothing; after a step in between, it does, because the values are stale."""

    def rank(ranks: Collectives) -> None:
        module = sharded(Stack, ranks, units=BLOCKS, use_orig_params=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        block = units_in(module)[1]
        loss(module, ranks.rank).backward()
        log = EventLog()
        with observe(module, log):
            block.hold()
            assert block.showing.are_held
            with torch.no_grad():
                module(batch(ranks.rank))
            assert not block.showing.are_held
        assert kinds(log, block).count("unshard") == 1
        block.hold()
        block.finish_unshard()
        before = block.module.up.weight.detach().clone()
        optimizer.step()
        block.hold()
        block.finish_unshard()
        assert not torch.equal(before, block.module.up.weight)
        block.reshard()

    run(2, rank)


def test_a_caller_may_gather_what_no_pass_uses() -> None:
    """A pass that does not call the unit leaves its full parameters in memory."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    module(batch())
    first, last = units_in(module)[1:]
    last.hold()
    first.module(batch())
    assert last.residency is Residency.UNSHARDING
    last.finish_unshard()
    last.reshard()


def test_a_backward_that_needs_no_parameters() -> None:
    """With `unshards_in_backward=False` an embedding is gathered once a step, and its gradients are the same."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, WIDTH)
            self.rest = Stack()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.rest(self.table(x))
            return out

    def of_words(module: nn.Module, rank: int) -> torch.Tensor:
        out: torch.Tensor = module(torch.tensor([0, rank, 3])).square().mean()
        return out

    def rank(ranks: Collectives) -> Any:
        module = sharded(Words, ranks, units=["table"], use_orig_params=True)
        table = unit_of(module.table)
        assert table is not None
        table.change_plan(unshards_in_backward=False)
        log = EventLog()
        with observe(module, log):
            of_words(module, ranks.rank).backward()
        assert kinds(log, table).count("unshard") == 1
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Words), of_words, 2)
    for found in run(2, rank):
        check_same(found, expected)


def test_outputs_are_cast() -> None:
    """`output_dtype` casts floating-point outputs, with and without a dtype for inputs, also those of a block."""
    module = sharded(Stack, SingleCollectives(), casting=Casting(output_dtype=torch.float64))
    assert module(batch()).dtype is torch.float64
    loss(module, 0).backward()
    module = sharded(Stack, SingleCollectives(), casting=Casting(torch.float32, output_dtype=torch.float16))
    assert module(batch().double()).dtype is torch.float16


def test_a_unit_without_parameters_casts_if_it_is_told_to() -> None:
    """`without_parameters` has a unit below the root cast its inputs although it has no parameters."""
    casting = Casting(torch.float32, below_root=True)
    assert not casting.applies(is_top=False, manages=False)
    assert Casting(torch.float32, below_root=True, without_parameters=True).applies(
        is_top=False, manages=False
    )
    assert not Casting(torch.float32, without_parameters=True).applies(is_top=False, manages=False)


def test_clipping_by_groups() -> None:
    """Parts count with those of the other ranks of their group, whole gradients once; a rank may have no part."""

    def rank(ranks: Collectives) -> Any:
        part = torch.full((2,), 3.0) if ranks.rank == 0 else None
        whole = torch.tensor([4.0])
        norm = clip_gradients_({ranks: [] if part is None else [part]}, [whole], 1.0, device=whole.device)
        return norm, part, whole

    expected = (9.0 + 9.0 + 16.0) ** 0.5
    for norm, part, whole in run(2, rank):
        torch.testing.assert_close(norm, torch.tensor(expected))
        torch.testing.assert_close(whole, torch.tensor([4.0]) / expected)
        assert part is None or torch.allclose(part, torch.full((2,), 3.0) / expected)


def test_clipping_by_groups_of_a_norm_that_is_not_finite() -> None:
    """It is refused on every rank on demand, and no gradient has changed."""

    def rank(ranks: Collectives) -> None:
        gradient = torch.tensor([float("inf") if ranks.rank == 1 else 1.0])
        kept = gradient.clone()
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            clip_gradients_({ranks: [gradient]}, [], 1.0, device=gradient.device, error_if_nonfinite=True)
        assert torch.equal(gradient, kept)

    run(2, rank)
