"""The oracle: the same training in one process, on the unsharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from integration_tests.parity.runs import OPTIMIZERS, Run, gradients_of, parameters_of
from integration_tests.parity.zoo import STEPS, Case, named

DIVISORS = {2: (2.0, 1.0), 3: (2.0, 1.5)}
"""By which a gradient is divided before and after the sum over this many ranks."""

StepGradients: TypeAlias = Callable[[nn.Module, Case, int, int], list[Tensor]]
"""Leaves the gradients of a step in the model and returns the losses of that many ranks."""


@functools.cache
def reduced(name: str, ranks: int, optimizer: str, *, flat: bool) -> Run:
    """Each rank's gradients computed by themselves, then reduced by the documented rule, in rank order.

    ``((g0 / before + g1 / before) + g2 / before) / after``, where ``before`` is a power of two and ``before * after`` the
    number of ranks.

    Args:
        flat: with use_orig_params=False there is one gradient for all parameters that share a flat parameter: zero for
            those that no rank used, where any was used.
    """
    case = named(name)
    return _train(case, ranks, optimizer, _separate_gradients, flat)


@functools.cache
def mean_of_losses(name: str, ranks: int, optimizer: str, *, flat: bool) -> Run:
    """One backward pass of the mean of the ranks' losses, all in one graph: what data-parallel training stands for."""
    return _train(named(name), ranks, optimizer, _mean_gradients, flat)


def _train(case: Case, ranks: int, optimizer: str, step_gradients: StepGradients, flat: bool) -> Run:
    model = case.build()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    run = Run([], [], [])
    for step in range(STEPS):
        stepper.zero_grad()
        losses = step_gradients(model, case, step, ranks)
        if flat:
            share_zeros(model, case)
        run.losses.append(losses)
        run.gradients.append(gradients_of(model))
        stepper.step()
        run.parameters.append(parameters_of(model))
    return run


def _separate_gradients(model: nn.Module, case: Case, step: int, ranks: int) -> list[Tensor]:
    losses: list[Tensor] = []
    of_ranks = []
    for rank in range(ranks):
        model.zero_grad()
        losses.append(case.loss(model, step, rank))
        losses[-1].backward()
        of_ranks.append(gradients_of(model))
    for name, parameter in model.named_parameters():
        parameter.grad = reduce_by_rule([gradients[name] for gradients in of_ranks])
    return [loss.detach() for loss in losses]


def _mean_gradients(model: nn.Module, case: Case, step: int, ranks: int) -> list[Tensor]:
    losses = [case.loss(model, step, rank) for rank in range(ranks)]
    (sum(losses[1:], losses[0]) / ranks).backward()
    return [loss.detach() for loss in losses]


def reduce_by_rule(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The mean of the ranks' gradients, with the roundings that the reduction has; None where no rank has one."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return None
    before, after = DIVISORS[len(gradients)]
    total = torch.zeros_like(given[0])
    for gradient in gradients:
        if gradient is not None:
            total += gradient / before
    return total / after


def share_zeros(model: nn.Module, case: Case) -> None:
    """Give a zero gradient to every parameter that has none and shares a flat parameter with one that has."""
    together: dict[object, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        # The innermost comes first.
        unit = next((unit for unit in case.units if name.startswith(f"{unit}.")), "")
        together.setdefault((unit, parameter.dtype, parameter.requires_grad), []).append(parameter)
    for parameters in together.values():
        if any(parameter.grad is not None for parameter in parameters):
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
