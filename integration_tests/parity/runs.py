"""What a training run came to, and how two runs are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

Named = Mapping[str, Tensor | None]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


@attrs.frozen(eq=False)
class Run:
    """Some steps of training.

    Attributes:
        losses: for each step, each rank's.
        gradients: for each step, full gradients by parameter, before the optimizer's step; None where there is none.
        parameters: for each step, full parameters after the optimizer's step.
    """

    losses: Sequence[Sequence[Tensor]]
    gradients: Sequence[Named]
    parameters: Sequence[Named]


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of the gradients of an unsharded model."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters of an unsharded model."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(found: Run, expected: Run) -> None:
    """Demand that every loss, gradient (or its absence) and parameter is the same, bit for bit."""
    assert expected.parameters, "nothing to compare"
    for step, of_ranks in enumerate(zip(found.losses, expected.losses, strict=True)):
        for rank, (a, b) in enumerate(zip(*of_ranks, strict=True)):
            assert torch.equal(a, b), f"step {step}: the loss of rank {rank} is {a.item()!r}, not {b.item()!r}"
    for what, ours, oracles in (
        ("gradient", found.gradients, expected.gradients),
        ("parameter", found.parameters, expected.parameters),
    ):
        for step, (mine, theirs) in enumerate(zip(ours, oracles, strict=True)):
            assert_same_tensors(mine, theirs, f"step {step}: {what}")


def assert_same_tensors(found: Named, expected: Named, what: str) -> None:
    """Demand equality bit for bit, and None exactly where None is expected."""
    assert set(found) == set(expected)
    for name, theirs in expected.items():
        mine = found[name]
        if mine is None or theirs is None:
            assert mine is theirs, f"{what} {name}: found {mine}, expected {theirs}"
            continue
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), f"{what} {name}"
        assert torch.equal(mine, theirs), (
            f"{what} {name} differs in {int((mine != theirs).sum())} of {mine.numel()} elements, "
            f"by {(mine - theirs).abs().max().item():.3g} at most"
        )


def distance(found: Named, expected: Named) -> float:
    """The largest difference of any element, in ulps of the largest element of all (of ``expected``).

    The unit is common to the model, because a gradient that is zero but for rounding has no size of its own.
    """
    pairs = [(found[name], theirs) for name, theirs in expected.items() if theirs is not None and theirs.numel()]
    largest = max(float(theirs.abs().max()) for _, theirs in pairs)
    worst = 0.0
    for mine, theirs in pairs:
        assert mine is not None
        worst = max(worst, float((mine.double() - theirs.double()).abs().max()))
    return worst / (largest * torch.finfo(torch.float32).eps)
