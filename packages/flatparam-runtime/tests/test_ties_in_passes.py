"""Units that share parameters, in everything that a pass may be: prefetched, failing, evaluated, differentiated twice."""

from __future__ import annotations

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives
from flatparam_runtime import BackwardOrder, PrefetchPlan, no_sync, summon_full_params

from .models import TiedBranches, TiedChain, TiedRoot, batch, gradient_penalty
from .worlds import check_at_rest, check_same, check_training, full_parameters, run, seeded, sharded

SIDES = ["left", "right"]
MODELS = {TiedChain: ["blocks.0", "blocks.1", "blocks.2"], TiedRoot: ["blocks.0", "blocks.1"]}
PLANS = [
    PrefetchPlan(2, backward_depth=2),
    PrefetchPlan(0, BackwardOrder.AFTER_COMPUTE),
    PrefetchPlan(0, BackwardOrder.NEVER),
]


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


@each_row("model", MODELS)
@each_row("plan", PLANS, ids=str)
def test_prefetched(model: type[nn.Module], plan: PrefetchPlan, ranks: int, free_after_forward: bool) -> None:
    """However far ahead units are gathered, a borrower finds what it borrows."""
    how = {"prefetch": plan, "free_after_forward": free_after_forward}
    check_training(model, [loss] * 3, ranks, units=MODELS[model], **how)


@pytest.mark.parametrize("model", MODELS)
def test_differentiated_twice(
    model: type[nn.Module], ranks: int, use_orig_params: bool, free_after_forward: bool
) -> None:
    """A gradient penalty goes through every use of a shared parameter."""
    how = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    check_training(model, [gradient_penalty] * 2, ranks, units=MODELS[model], **how)


def test_one_unit_accumulates(ranks: int, use_orig_params: bool) -> None:
    """``no_sync`` of the borrower alone holds back its own gradients; what it borrows goes with the holder's."""

    def accumulating(module: nn.Module, rank: int) -> Tensor:
        with no_sync(module.right):
            loss(module, rank).backward()
        return loss(module, rank)

    # The holder's gradients of the two passes are added after the sum over ranks.
    how = {"use_orig_params": use_orig_params, "exact": False}
    check_training(TiedBranches, [accumulating] * 2, ranks, units=SIDES, **how)


def test_evaluated_in_between(ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """An evaluation of all, or of the borrower alone, between a forward and its backward changes no gradient."""

    def interrupted(module: nn.Module, rank: int) -> Tensor:
        before = loss(module, rank)
        with torch.no_grad():
            module(batch(rank, 1))
            module.right(batch(rank))
        return before + loss(module, rank)

    how = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    check_training(TiedBranches, [interrupted] * 2, ranks, units=SIDES, **how)


class Failure(Exception):
    """The exception that the hooks below raise."""


def test_failing(ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """After an exception in the holder, in the borrower, or in backward, the next step is right."""

    def fail(*_: object) -> None:
        raise Failure

    def failing(module: nn.Module, rank: int) -> Tensor:
        for part in (module.left.down, module.right.down):
            hook = part.register_forward_hook(fail)
            with pytest.raises(Failure):
                module(batch(rank))
            hook.remove()
        out = module(batch(rank))
        out.register_hook(fail)
        with pytest.raises(Failure):
            out.sum().backward()
        return loss(module, rank)

    how = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    check_training(TiedBranches, [failing] * 2, ranks, units=SIDES, **how)


@each_row("model", MODELS)
@each_row("asked", [{}, {"rank0_only": True}, {"with_grads": True}], ids=str)
def test_summoned(model: type[nn.Module], asked: dict[str, bool], ranks: int, use_orig_params: bool) -> None:
    """Summoned, a shared parameter is listed once, under its first name, and changed once."""

    def look(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(model, collectives, units=MODELS[model], use_orig_params=use_orig_params)
        loss(module, collectives.rank).backward()
        with summon_full_params(module, **asked), torch.no_grad():
            if collectives.rank == 0 or not asked.get("rank0_only"):
                check_same(dict(module.named_parameters()), dict(seeded(model).named_parameters()))
                for parameter in module.parameters():
                    parameter.mul_(2.0)
        check_at_rest(module)
        return dict(full_parameters(module))

    expected = {name: 2.0 * parameter.detach() for name, parameter in seeded(model).named_parameters()}
    for found in run(ranks, look):
        check_same(found, dict(expected))
