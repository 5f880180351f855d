"""Plans beside the add-on whose optimizers exchange whole matrices."""

import pytest
import torch
from torch import nn

from flatparam import PlanError, plan
from flatparam.optim import Adafactor, MatrixOptimizer, Muon, Shampoo, TransformersAdafactor


def scaled(matrix: torch.Tensor, gradient: torch.Tensor, state: object, **settings: object) -> torch.Tensor:
    return gradient


def own(parameters: object) -> MatrixOptimizer:
    """A user's own step of matrices."""
    return MatrixOptimizer(parameters, scaled, lr=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [Adafactor, Muon, Shampoo, TransformersAdafactor, own])
def test_an_optimizer_of_whole_matrices_is_refused(make: object) -> None:
    """It exchanges matrices with ranks that a plan does not have, and the error says what to plan with."""
    found = "MatrixOptimizer" if make is own else make.__name__  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=f"found {found}, which exchanges whole matrices"):
        plan(
            lambda: nn.Linear(8, 8),
            torch.ones(2, 8),
            world_size=2,
            optimizer=make,  # type: ignore[arg-type]
            use_orig_params=True,
        )


def test_alone_it_is_planned() -> None:
    """A world of one has no ranks to exchange with."""
    found = plan(lambda: nn.Linear(8, 8), torch.ones(2, 8), world_size=1, optimizer=Muon)
    assert found.peak.nbytes > 0
