"""What an optimizer sees: gradients of what was not used, parameters from before the wrapping, their dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatparam_comm import Collectives
from integration_tests.lifted.our_half import (
    adamw,
    batch,
    both_exposures,
    full_gradients,
    full_parameters,
    mlp,
    on_two_ranks,
    seeded,
    sgd,
    square_loss,
    train,
    train_local,
    wrapped,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.runs import assert_same_tensors, gradients_of, parameters_of


class Partial(nn.Module):
    """A unit of which a call uses a part: always one layer, never another, and a third on rank 1 only."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.used(x)
        return self.sometimes(x) if rank else x


def partial_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank), rank).square().mean()


def same_part_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Every rank uses the same layers."""
    return model(batch(step, rank), 1).square().mean()


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves vectors alone: the usual groups, by `p.ndim`."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def torch_l06(group: Collectives, use_orig_params: bool) -> tuple[list[Tensor], bool]:
    """The gradients of the layer that is never used, and whether AdamW has changed it."""
    model = fsdp1(seeded(Partial), use_orig_params=use_orig_params)
    before = full_parameters(model)
    train(model, adamw(model.parameters()), group.rank, partial_loss)
    grads = [p.grad for name, p in model.named_parameters() if "never" in name and p.numel()]
    return grads, not torch.equal(full_parameters(model)["never.weight"], before["never.weight"])


def torch_l07_optimizer_first(group: Collectives, use_orig_params: bool) -> dict[str, Tensor]:
    module = seeded(mlp)
    optimizer = sgd(module.parameters())
    model = fsdp1(module, use_orig_params=use_orig_params)
    train(model, optimizer, group.rank)
    return full_parameters(model)


def torch_l07_groups_by_ndim(group: Collectives, use_orig_params: bool) -> list[int]:
    model = fsdp1(seeded(mlp), use_orig_params=use_orig_params)
    return [p.ndim for p in model.parameters()]


@both_exposures
def test_l06_torch_decays_what_was_not_used(processes: Outcomes, use_orig_params: bool) -> None:
    """L-06: what was not used in a used unit has a gradient of zero in torch, and AdamW decays it, originals too."""
    of_ranks = processes.values(torch_l06, use_orig_params)
    grads = [grad for found, _ in of_ranks for grad in found]
    assert all(grad is not None and not grad.any() for grad in grads)
    assert bool(grads) == use_orig_params  # a flat parameter has one gradient for all
    assert all(changed for _, changed in of_ranks)


def test_l06_what_was_not_used_has_no_gradient() -> None:
    """L-06: with use_orig_params its gradient is None on each rank that has it, and AdamW leaves it, as unsharded."""

    def rank(group: Collectives) -> tuple[dict[str, bool], dict[str, Tensor | None], dict[str, Tensor]]:
        model = wrapped(seeded(Partial), use_orig_params=True)
        train(model, adamw(model.parameters()), group.rank, partial_loss)
        held = {name.rpartition("module.")[2]: p.grad is None for name, p in model.named_parameters() if p.numel()}
        return held, full_gradients(model), full_parameters(model)

    reference = seeded(Partial)
    expected = train_local(reference, adamw(reference.parameters()), partial_loss)
    gradients = gradients_of(reference)
    assert gradients["never.weight"] is None
    assert gradients["sometimes.weight"] is not None  # rank 1's counts on both
    for held, found_gradients, found in on_two_ranks(rank):
        assert held == {name: grad is None for name, grad in gradients.items() if name in held}
        assert len(held) > 0
        assert_same_tensors(found_gradients, gradients, "gradient")
        assert_same_tensors(found, expected, "parameter")


def test_l06_a_flat_parameter_that_no_rank_used_has_no_gradient() -> None:
    """L-06: one flat parameter has one gradient: it is None where nothing in it was used, on any rank."""

    def rank(group: Collectives) -> tuple[list[str], dict[str, Tensor]]:
        model = wrapped(seeded(Partial), nn.Linear)
        train(model, adamw(model.parameters()), group.rank, same_part_loss)
        return [name for name, p in model.named_parameters() if p.grad is None], full_parameters(model)

    reference = seeded(Partial)
    expected = train_local(reference, adamw(reference.parameters()), same_part_loss)
    for without, found in on_two_ranks(rank):
        assert len(without) == 1
        assert "never" in without[0]
        assert_same_tensors(found, expected, "parameter")


def test_l07_torch_does_not_train_what_was_listed_before(processes: Outcomes) -> None:
    """L-07: with use_orig_params=False an optimizer from before the wrapping changes nothing in torch, in silence."""
    for found in processes.values(torch_l07_optimizer_first, False):
        assert_same_tensors(found, parameters_of(seeded(mlp)), "parameter")


def test_l07_torch_trains_originals_that_were_listed_before(processes: Outcomes) -> None:
    """L-07 holds for flat parameters only: with use_orig_params=True torch 2.13 keeps the objects, and trains them."""
    reference = seeded(mlp)
    expected = train_local(reference, sgd(reference.parameters()))
    for found in processes.values(torch_l07_optimizer_first, True):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
def test_l07_torch_shows_vectors_only(processes: Outcomes, use_orig_params: bool) -> None:
    """L-07: every parameter has one dimension in torch, so that groups by `p.ndim` are wrong in silence."""
    for dimensions in processes.values(torch_l07_groups_by_ndim, use_orig_params):
        assert set(dimensions) == {1}


@both_exposures
@pytest.mark.parametrize("units", [(), (nn.Linear,)], ids=["whole", "units"])
def test_l07_an_optimizer_may_come_before_the_wrapping(
    units: tuple[type[nn.Module], ...], use_orig_params: bool
) -> None:
    """L-07: it trains as ever, in groups by `p.ndim` too, because what it holds are views of the shards by then."""

    def rank(group: Collectives) -> dict[str, Tensor]:
        module = seeded(mlp)
        optimizer = decayed(module.parameters())
        model = wrapped(module, *units, use_orig_params=use_orig_params)
        train(model, optimizer, group.rank)
        return full_parameters(model)

    reference = seeded(mlp)
    expected = train_local(reference, decayed(reference.parameters()))
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")


def test_l07_dimensions_are_kept() -> None:
    """L-07: with use_orig_params each parameter has its dimensions on every rank, so groups by `p.ndim` are right."""

    def rank(group: Collectives) -> tuple[list[int], list[int], dict[str, Tensor]]:
        model = wrapped(seeded(mlp), nn.Linear, use_orig_params=True)
        before = [p.ndim for p in model.parameters()]
        train(model, decayed(model.parameters()), group.rank)
        return before, [p.ndim for p in model.parameters()], full_parameters(model)

    reference = seeded(mlp)
    expected = train_local(reference, decayed(reference.parameters()))
    for before, after, found in on_two_ranks(rank):
        assert before == after == [p.ndim for p in reference.parameters()]
        assert_same_tensors(found, expected, "parameter")


def test_l07_a_step_before_the_wrapping_counts() -> None:
    """L-07: an optimizer that has stepped on the module before the wrapping goes on with it afterwards."""

    def rank(group: Collectives) -> dict[str, Tensor]:
        module = seeded(mlp)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        square_loss(module, 9, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        model = wrapped(module, nn.Linear, use_orig_params=True)
        train(model, optimizer, group.rank)
        return full_parameters(model)

    reference = seeded(mlp)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    square_loss(reference, 9, 0).backward()
    optimizer.step()
    expected = train_local(reference, optimizer)
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")
