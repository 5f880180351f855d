"""Adafactor, Shampoo and optimizers of one's own over sharded parameters: the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatparam.optim import Adafactor, MatrixOptimizer, Shampoo, TransformersAdafactor

from .whole_cases import Case, Sign, all_cases, check, few_cases

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


KINDS: dict[str, tuple[Any, int]] = {
    "Adafactor": (lambda parameters: Adafactor(parameters, lr=0.05, weight_decay=0.1), 16),
    "transformers": (lambda parameters: TransformersAdafactor(parameters), 16),
    "transformers, first moments": (
        lambda parameters: TransformersAdafactor(
            parameters, lr=0.05, relative_step=False, beta1=0.9, weight_decay=0.1
        ),
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
