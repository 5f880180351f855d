"""Parameters that the modules of several units share: one unit holds them, the others borrow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatparam_comm import Collectives, SingleCollectives
from flatparam_runtime import no_sync, summon_full_params, unit_of

from .models import WIDTH, Branches, Chain, Stack, batch
from .worlds import (
    check_at_rest,
    check_same,
    full_gradients,
    full_parameters,
    mean_gradients,
    run,
    seeded,
    sharded,
)

SIDES = ["left", "right"]
WAYS = ["lr", "rl", "l", "r", "lrl", "rrl"]
SHARED = "left.up.weight"


class TiedBranches(Branches):
    """The right branch uses a weight of the left one."""

    def __init__(self) -> None:
        super().__init__()
        self.right.up.weight = self.left.up.weight


class TiedChain(Chain):
    """All blocks share their first weight, the last two also their second."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.up.weight = self.blocks[0].up.weight
        self.blocks[2].down.weight = self.blocks[1].down.weight


class TiedRoot(Stack):
    """The root's own head uses a weight of the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.blocks[0].up.weight


MODELS: dict[type[nn.Module], Sequence[str]] = {
    TiedChain: ["blocks.0", "blocks.1", "blocks.2"],
    TiedRoot: ["blocks.0", "blocks.1"],
}
Losses = Callable[[nn.Module, int], Tensor]


def loss(module: nn.Module, rank: int, *way: str) -> Tensor:
    out: Tensor = module(batch(rank), *way).square().mean()
    return out


def trained(
    steps: Sequence[Losses], ranks: int, model: type[nn.Module], units: Sequence[str], **plan: Any
) -> None:
    """Check the gradients of each of ``steps``, and the values that SGD makes of all of them."""

    def training(collectives: Collectives) -> list[dict[str, Tensor | None]]:
        module = sharded(model, collectives, units=units, **plan)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
        found = []
        for step in steps:
            optimizer.zero_grad()
            step(module, collectives.rank).backward()
            check_at_rest(module)
            found.append(full_gradients(module))
            optimizer.step()
        return [*found, dict(full_parameters(module))]

    local = seeded(model)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.25)
    expected = []
    for step in steps:
        expected.append(mean_gradients(local, step, ranks))
        for name, parameter in local.named_parameters():
            parameter.grad = expected[-1][name]
        optimizer.step()
        optimizer.zero_grad()
    for found in run(ranks, training):
        for each, wanted in zip(found, [*expected, dict(local.named_parameters())], strict=True):
            check_same(each, wanted)


@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_of_the_local_model(
    model: type[nn.Module], ranks: int, use_orig_params: bool, free_after_forward: bool
) -> None:
    """A shared parameter gets the sum of the gradients of all its uses, and stays one parameter, step after step."""
    plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    trained([loss] * 3, ranks, model, MODELS[model], **plan)


@pytest.mark.parametrize("way", WAYS)
def test_any_order_of_use(way: str, ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """Whichever unit is called first, twice, or not at all, holder or borrower, the gradients are right."""
    plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    steps = [lambda module, rank, w=w: loss(module, rank, w) for w in (way, "lr", way)]
    trained(steps, ranks, TiedBranches, SIDES, **plan)


def test_a_borrower_called_by_itself(ranks: int, use_orig_params: bool) -> None:
    """A borrower that is called alone, outside of the root's forward, gathers and trains what it borrows."""

    def alone(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module.right(batch(rank)).square().mean()
        return out

    trained([loss, alone], ranks, TiedBranches, SIDES, use_orig_params=use_orig_params)


def test_frozen(ranks: int, use_orig_params: bool) -> None:
    """A shared parameter that is frozen before sharding gets no gradient; what is around it does."""

    class Frozen(TiedBranches):
        def __init__(self) -> None:
            super().__init__()
            self.left.up.weight.requires_grad_(False)

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Frozen, collectives, units=SIDES, use_orig_params=use_orig_params)
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Frozen), loss, ranks)
    assert expected[SHARED] is None
    for found in run(ranks, step):
        check_same(found, expected)


def test_frozen_and_thawed(ranks: int) -> None:
    """With originals a shared parameter can be frozen and thawed between steps, for all units that use it."""

    def freezing(wanted: bool) -> Losses:
        def step(module: nn.Module, rank: int) -> Tensor:
            module.left.up.weight.requires_grad_(wanted)
            return loss(module, rank)

        return step

    trained(
        [freezing(True), freezing(False), freezing(True)], ranks, TiedBranches, SIDES, use_orig_params=True
    )


def test_accumulation(ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """What both units collect in ``no_sync`` is reduced with the next gradients, also of a pass with one of them."""

    def steps(collectives: Collectives) -> dict[str, Tensor | None]:
        plan = {"use_orig_params": use_orig_params, "free_after_unsynced_backward": free_after_forward}
        module = sharded(TiedBranches, collectives, units=SIDES, **plan)
        with no_sync(module):
            for way in ("lr", "r"):
                loss(module, collectives.rank, way).backward()
        loss(module, collectives.rank, "l").backward()
        check_at_rest(module)
        return full_gradients(module)

    def together(module: nn.Module, rank: int) -> Tensor:
        for way in ("lr", "r"):
            loss(module, rank, way).backward()
        return loss(module, rank, "l")

    expected = mean_gradients(seeded(TiedBranches), together, ranks)
    for found in run(ranks, steps):
        check_same(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool, ranks: int, use_orig_params: bool) -> None:
    """Units that share a parameter are recomputed with it."""

    def recomputed(module: nn.Module, rank: int) -> Tensor:
        x = batch(rank).requires_grad_()
        for name in "lrl":
            side = module.left if name == "l" else module.right
            x = checkpoint(side, x, use_reentrant=reentrant)
        out: Tensor = x.square().mean()
        return out

    trained([recomputed] * 2, ranks, TiedBranches, SIDES, use_orig_params=use_orig_params)


def test_a_shared_parameter_is_one_object(use_orig_params: bool) -> None:
    """Shown whole it is the same object under all its names, held once; the borrower says whom it borrows from."""
    module = sharded(TiedBranches, SingleCollectives(), units=SIDES, use_orig_params=use_orig_params)
    left, right = unit_of(module.left), unit_of(module.right)
    assert left is not None
    assert right is not None
    assert (right.lenders, left.borrowers) == ([left], [right])
    assert (
        sum(handle.layout.fqns.count("up.weight") for unit in (left, right) for handle in unit.handles) == 1
    )
    for _ in range(2):
        with summon_full_params(module):
            assert module.left.up.weight is module.right.up.weight
            assert len(list(module.parameters())) == 6
        assert module.left.up.weight is module.right.up.weight
