"""Adafactor, Shampoo and optimizers of one's own over sharded parameters: the bits of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel
from flatparam_comm import Collectives, run_threads
from flatparam_optim import Adafactor, MatrixOptimizer, Shampoo, TransformersAdafactor
from flatparam_state import optimizer_state_dict
from integration_tests.matrices.whole_cases import Case, Sign, all_cases, check, few_cases

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


KINDS: dict[str, tuple[Any, int]] = {
    "Adafactor": (lambda parameters: Adafactor(parameters, lr=0.05, weight_decay=0.1), 16),
    "transformers": (lambda parameters: TransformersAdafactor(parameters), 16),
    "transformers, first moments": (
        lambda parameters: TransformersAdafactor(parameters, lr=0.05, relative_step=False, beta1=0.9, weight_decay=0.1),
        16,
    ),
    "Shampoo": (lambda parameters: Shampoo(parameters, every=2, weight_decay=0.1), 6),
    "own": (lambda parameters: MatrixOptimizer(parameters, Sign(), lr=0.1), 6),
}
PLAIN: dict[str, Any] = {
    **{name: make for name, (make, _) in KINDS.items()},
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05, weight_decay=0.1),
}


def is_exact(kind: str, case: Case) -> None:
    make, whole = KINDS[kind]
    check(case, make, lambda model: [PLAIN[kind](model.parameters())], whole=whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_may_be_empty(kind: str) -> None:
    """As with torch's optimizers, such as a list of biases of a model that has none: it steps, is saved and loaded."""

    def train(world: Collectives) -> dict[str, Any]:
        torch.manual_seed(0)
        model = FullyShardedDataParallel(nn.Linear(4, 4, bias=False), world, use_orig_params=True)
        optimizer = KINDS[kind][0]([{"params": [*model.parameters()]}, {"params": [], "weight_decay": 0.0}])
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]

    for state in run_threads(2, train):
        assert list(state) == ["weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_is_refused_adds_nothing(kind: str) -> None:
    """A parameter that another group has is refused before the others of its group are added."""
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    optimizer = KINDS[kind][0]([model[0].weight, model[0].bias])
    before = [len(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[1].weight, model[0].bias]})
    assert [len(group["params"]) for group in optimizer.param_groups] == before


@pytest.mark.parametrize("kind", ["Adafactor", "transformers", "Shampoo"])
def test_an_empty_parameter_has_no_owner(kind: str) -> None:
    """The state before the first step, which a sharded load fills, is there for all others."""

    class Holey(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.none = nn.Parameter(torch.empty(0, 3))

    def states(world: Collectives) -> dict[str, Any]:
        model = FullyShardedDataParallel(Holey(), world, use_orig_params=True)
        optimizer = KINDS[kind][0](model.parameters())
        return optimizer_state_dict(model, optimizer, first_state=True)["state"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run_threads(2, states)
    assert all({"weight", "bias"} <= set(state) for state in found)


@pytest.mark.parametrize("case", few_cases(), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_others_are_exact(kind: str, case: Case) -> None:
    """Parameters and states are those of one process given equal gradients, to the bit: Adafactor's are torch's."""
    is_exact(kind, case)


@pytest.mark.long
@pytest.mark.parametrize("case", list(all_cases()), ids=str)
@pytest.mark.parametrize("kind", ["Adafactor", "Shampoo"])
def test_others_are_exact_in_every_setting(kind: str, case: Case) -> None:
    """The same for every combination of ranks, wrapping, strategy, exposure, layout, accumulation and clipping."""
    is_exact(kind, case)
