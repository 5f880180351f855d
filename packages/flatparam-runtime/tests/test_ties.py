"""Parameters that the modules of several units share: one unit holds them, the others borrow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from each_row import each_row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatparam_comm import SingleCollectives
from flatparam_runtime import no_sync, summon_full_params, unit_of

from .models import TiedBranches, TiedChain, TiedRoot, batch
from .worlds import check_training, mean_gradients, seeded, sharded

SIDES = ["left", "right"]

WAYS = ["lr", "rl", "l", "r", "lrl", "rrl"]


MODELS: dict[type[nn.Module], Sequence[str]] = {
    TiedChain: ["blocks.0", "blocks.1", "blocks.2"],
    TiedRoot: ["blocks.0", "blocks.1"],
}
Losses = Callable[[nn.Module, int], Tensor]


def loss(module: nn.Module, rank: int, *way: str) -> Tensor:
    out: Tensor = module(batch(rank), *way).square().mean()
    return out


@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_of_the_local_model(
    model: type[nn.Module], ranks: int, use_orig_params: bool, free_after_forward: bool
) -> None:
    """A shared parameter gets the sum of the gradients of all its uses, and stays one parameter, step after step."""
    plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    check_training(model, [loss] * 3, ranks, units=MODELS[model], **plan)


@each_row("way", WAYS)
def test_any_order_of_use(way: str, ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """Whichever unit is called first, twice, or not at all, the holder or the borrower, the gradients are right."""
    plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    steps = [lambda module, rank, w=w: loss(module, rank, w) for w in (way, "lr", way)]
    check_training(TiedBranches, steps, ranks, units=SIDES, **plan)


def test_a_borrower_called_by_itself(ranks: int, use_orig_params: bool) -> None:
    """A borrower that is called alone, outside of the root's forward, gathers and trains what it borrows."""

    def alone(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module.right(batch(rank)).square().mean()
        return out

    check_training(TiedBranches, [loss, alone], ranks, units=SIDES, use_orig_params=use_orig_params)


def test_frozen(ranks: int, use_orig_params: bool) -> None:
    """A shared parameter that is frozen before sharding gets no gradient; what is around it does."""

    class Frozen(TiedBranches):
        def __init__(self) -> None:
            super().__init__()
            self.left.up.weight.requires_grad_(False)

    assert mean_gradients(seeded(Frozen), loss, 1)["left.up.weight"] is None
    check_training(Frozen, [loss] * 2, ranks, units=SIDES, use_orig_params=use_orig_params)


def test_frozen_and_thawed(ranks: int) -> None:
    """With originals a shared parameter can be frozen and thawed between steps, for all units that use it."""

    def freezing(wanted: bool) -> Losses:
        def step(module: nn.Module, rank: int) -> Tensor:
            module.left.up.weight.requires_grad_(wanted)
            return loss(module, rank)

        return step

    check_training(
        TiedBranches,
        [freezing(True), freezing(False), freezing(True)],
        ranks,
        units=SIDES,
        use_orig_params=True,
    )


def test_accumulation(ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """Gradients that both units collect in ``no_sync`` are reduced with the next ones, even of a pass with one unit."""

    def accumulating(module: nn.Module, rank: int) -> Tensor:
        with no_sync(module):
            for way in ("lr", "r"):
                loss(module, rank, way).backward()
        return loss(module, rank, "l")

    plan = {"use_orig_params": use_orig_params, "free_after_unsynced_backward": free_after_forward}
    check_training(TiedBranches, [accumulating] * 2, ranks, units=SIDES, **plan)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool, ranks: int, use_orig_params: bool) -> None:
    """Units that share a parameter are recomputed with it.

    Each reentrant recomputation is reduced by itself: the sum over uses and ranks has a different order.
    """

    class Checkpointed(TiedBranches):
        def forward(self, x: Tensor, way: str = "lrl") -> Tensor:
            for step in way:
                side = self.left if step == "l" else self.right
                x = checkpoint(side, x, use_reentrant=reentrant)
            return x * self.scale

    def recomputed(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank).requires_grad_()).square().mean()
        return out

    check_training(
        Checkpointed,
        [recomputed] * 2,
        ranks,
        units=SIDES,
        exact=not reentrant,
        use_orig_params=use_orig_params,
    )


def test_units_that_are_roots(ranks: int, use_orig_params: bool) -> None:
    """Units that share a parameter train even if the module around them is never called."""

    def apart(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module.right(module.left(batch(rank))).square().mean()
        return out

    check_training(TiedBranches, [apart] * 2, ranks, units=SIDES, use_orig_params=use_orig_params)


def test_a_shared_parameter_is_one_object(use_orig_params: bool) -> None:
    """Shown whole it is the same object under all its names, held once; the borrower says whom it borrows from."""
    module = sharded(TiedBranches, SingleCollectives(), units=SIDES, use_orig_params=use_orig_params)
    left, right = unit_of(module.left), unit_of(module.right)
    assert left is not None
    assert right is not None
    assert (right.links.lenders, left.links.borrowers) == ([left], [right])
    assert sum(handle.layout.fqns.count("up.weight") for unit in (left, right) for handle in unit.handles) == 1
    for _ in range(2):
        with summon_full_params(module):
            assert module.left.up.weight is module.right.up.weight
            assert len(list(module.parameters())) == 6
        assert module.left.up.weight is module.right.up.weight


def test_several_parameters_of_one_lender(ranks: int, use_orig_params: bool) -> None:
    """A unit that shares two parameters with the same unit trains as the local model does."""

    class TiedTwice(TiedBranches):
        def __init__(self) -> None:
            super().__init__()
            self.right.down.weight = self.left.down.weight

    check_training(
        TiedTwice,
        [lambda module, rank: module(batch(rank)).square().mean()] * 2,
        ranks,
        units=["left", "right"],
        use_orig_params=use_orig_params,
    )
