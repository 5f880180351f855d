"""Optimizers of whole matrices on modules that the runtime alone has sharded: no wrapper is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from flatparam_comm import Collectives, Topology, run_threads
from flatparam_optim import Adafactor, MatrixOptimizer, Muon, Shampoo, TransformersAdafactor
from flatparam_runtime import UnitPlan, shard_module, summon_full_params


def signs(matrix: Tensor, gradient: Tensor, state: dict[str, Any], **settings: Any) -> Tensor:
    """The update of the user's own step, which needs the norm of the whole gradient."""
    return gradient.sign() * gradient.norm()


MAKES: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "Muon": lambda parameters: Muon(parameters, lr=0.05, adamw_lr=0.01),
    "Adafactor": lambda parameters: Adafactor(parameters, lr=0.05),
    "TransformersAdafactor": lambda parameters: TransformersAdafactor(parameters),
    "Shampoo": lambda parameters: Shampoo(parameters, lr=0.05, every=2),
    "MatrixOptimizer": lambda parameters: MatrixOptimizer(parameters, signs, lr=0.05),
}


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4))


def train(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Step three times on a batch that is the same on each rank: the mean of two equal gradients is exact."""
    optimizer = make(model.parameters())
    for number in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 5), float(number)).cumsum(1)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("frees", [True, False], ids=["full-shard", "shard-grad-op"])
@pytest.mark.parametrize("kind", MAKES)
def test_the_numbers_of_one_process(kind: str, frees: bool, use_orig_params: bool) -> None:
    """Parameters that are cut anywhere have the bits of those of one process after three steps."""

    def rank(ranks: Collectives) -> dict[str, Tensor]:
        model = build()
        plan = UnitPlan(Topology(ranks), free_after_forward=frees, use_orig_params=use_orig_params)
        shard_module(model[0], plan)
        shard_module(model, plan)
        train(model, MAKES[kind])
        with summon_full_params(model):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    plain = build()
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    train(plain, MAKES[kind])
    expected = dict(plain.named_parameters())
    assert all(not torch.equal(old, new) for old, new in zip(before, expected.values(), strict=True))
    for found in run_threads(2, rank):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", MAKES)
def test_a_step_that_is_a_number(kind: str) -> None:
    """A state that counts steps in an int, as transformers' Adafactor does, is stepped as one with a tensor."""
    stepped = []
    for count in (int, lambda number: torch.tensor(float(number))):
        model = build()
        optimizer = MAKES[kind](model.parameters())
        for number in range(2):
            model(torch.full((2, 5), 1.0 + number).cumsum(1)).square().mean().backward()
            optimizer.step()
            for parameter, state in optimizer.state.items():
                # AdamW, which steps the others, is torch's.
                if "step" in state and parameter.ndim == 2:
                    state["step"] = count(int(state["step"]))
        stepped.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *stepped))


def by_row(matrix: Tensor, gradient: Tensor, state: dict[str, Any], **settings: Any) -> Tensor:
    """The update of a step that has one number for each row."""
    return gradient.mean(1, keepdim=True).expand_as(gradient)


def test_an_update_whose_elements_share_memory(use_orig_params: bool) -> None:
    """It is added as one that has travelled is, to the bit."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return MatrixOptimizer(parameters, by_row, lr=0.05, needs_matrix=False)

    def long() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(5, 400)

    def rank(ranks: Collectives) -> Tensor:
        model = long()
        shard_module(model, UnitPlan(Topology(ranks), use_orig_params=use_orig_params))
        train(model, make)
        with summon_full_params(model):
            return model.weight.detach().clone()  # type: ignore[union-attr, operator]

    plain = long()
    train(plain, make)
    for found in run_threads(2, rank):
        assert torch.equal(found, plain.weight)  # type: ignore[arg-type]
