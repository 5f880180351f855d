"""One parameter that several units use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam import ShardingStrategy
from flatparam_comm import Collectives
from integration_tests.lifted.our_half import (
    STEPS,
    Build,
    batch,
    both_exposures,
    full_parameters,
    on_two_ranks,
    seeded,
    sgd,
    square_loss,
    train,
    train_local,
    wrapped,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.runs import assert_same_tensors


class Tied(nn.Module):
    """Two layers with one weight and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class TiedToRoot(Tied):
    """The root uses the weight too, between its units."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh() @ self.weight) * self.scale


class Language(nn.Module):
    """An embedding whose weight is that of the head, and a block between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x * 10).long().abs() % 7
        return self.head(self.embed(tokens).mean(1) + self.block(x))


BUILDS: tuple[Build, ...] = (Tied, TiedToRoot, Language)


def named_twice(model: Any) -> dict[str, Tensor]:
    """Full parameters by all of their names."""
    with type(model).summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }


def torch_l02(group: Collectives, use_orig_params: bool) -> dict[str, Tensor]:
    model = fsdp1(seeded(Tied), nn.Linear, use_orig_params=use_orig_params)
    train(model, sgd(model.parameters()), group.rank)
    return named_twice(model)


def test_l02_torch_unties_flat_parameters(processes: Outcomes) -> None:
    """L-02: with use_orig_params=False torch trains two weights where there was one, and says nothing."""
    for found in processes.values(torch_l02, False):
        assert not torch.allclose(found["first.weight"], found["second.weight"], atol=0.01)


def test_l02_torch_fails_on_originals(processes: Outcomes) -> None:
    """L-02: with use_orig_params=True torch's forward pass fails."""
    assert "mat2 must be a matrix" in processes.error(torch_l02, True)


@both_exposures
@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@each_row("build", BUILDS, ids=lambda build: build.__name__)
def test_l02_ties_across_units_train(build: Build, strategy: str, use_orig_params: bool) -> None:
    """L-02: the weight stays one, under all of its names, and trains to the bits of the unsharded model."""

    def rank(group: Collectives) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = wrapped(
            seeded(build),
            nn.Linear,
            nn.Embedding,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
        train(model, sgd(model.parameters()), group.rank)
        return named_twice(model), model.state_dict()

    reference = seeded(build)
    train_local(reference, sgd(reference.parameters()))
    expected = {name: p.detach() for name, p in reference.named_parameters(remove_duplicate=False)}
    for found, state in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")
        assert_same_tensors(state, expected, "state")


@both_exposures
@each_row("build", BUILDS, ids=lambda build: build.__name__)
def test_l02_ties_accumulate(build: Build, use_orig_params: bool) -> None:
    """L-02: gradients from every use are summed in no_sync too: one step on the sum of several batches.

    To within rounding: the sum of a rank is a sum of sums there, and one sum of all here.
    """

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(seeded(build), nn.Linear, nn.Embedding, use_orig_params=use_orig_params)
        optimizer = sgd(model.parameters())
        with model.no_sync():
            for step in range(STEPS - 1):
                square_loss(model, step, group.rank).backward()
        square_loss(model, STEPS - 1, group.rank).backward()
        optimizer.step()
        return full_parameters(model)

    reference = seeded(build)
    optimizer = sgd(reference.parameters())
    for step in range(STEPS):
        for number in range(2):
            (square_loss(reference, step, number) / 2).backward()
    optimizer.step()
    expected = {name: p.detach() for name, p in reference.named_parameters()}
    for found in on_two_ranks(rank):
        for name, theirs in expected.items():
            torch.testing.assert_close(found[name], theirs, rtol=1e-6, atol=1e-7)


class Skipping(Tied):
    """Runs the second layer alone, which uses a weight that the first one's unit holds."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x)


@both_exposures
@pytest.mark.parametrize("owner_has_run", [True, False], ids=["run-before", "never-run"])
def test_l02_a_tie_of_which_one_use_is_skipped(owner_has_run: bool, use_orig_params: bool) -> None:
    """L-02: where a pass runs only the unit that does not own the weight, the weight is trained by that use alone."""

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(seeded(Skipping), nn.Linear, use_orig_params=use_orig_params)
        if owner_has_run:
            with torch.no_grad():
                model.first(batch(0, group.rank))
        train(model, sgd(model.parameters()), group.rank)
        return full_parameters(model)

    reference = seeded(Skipping)
    expected = train_local(reference, sgd(reference.parameters()))
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")
