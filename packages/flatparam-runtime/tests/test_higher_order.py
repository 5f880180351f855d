"""Gradients of gradients, several backward passes through one graph, and gradients that are asked for by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.func import functional_call

from flatparam_comm import Collectives
from flatparam_runtime import no_sync, summon_full_params

from .models import Chain, Stack, batch, gradient_penalty
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    check_training,
    full_gradients,
    mean_gradients,
    run,
    seeded,
    sharded,
)

BLOCKS = ["blocks.0", "blocks.1"]


def only_the_penalty(module: nn.Module, rank: int) -> Tensor:
    """Without a term in the output itself, and of third order."""
    x = batch(rank).requires_grad_()
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    total: Tensor = curve.square().mean()
    return total


def penalty_of_two_calls(module: nn.Module, rank: int) -> Tensor:
    """Real and fake samples, and the penalty between them."""
    real, fake = module(batch(rank)).mean(), module(batch(rank, 1)).mean()
    return fake - real + gradient_penalty(module, rank)


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


@each_row("loss", [gradient_penalty, only_the_penalty, penalty_of_two_calls])
@each_row("model", [Stack, lambda: Chain(2)], ids=["Stack", "Chain"])
def test_gradients_of_gradients(
    loss: Callable[[nn.Module, int], Tensor],
    model: Callable[[], nn.Module],
    ranks: int,
    use_orig_params: bool,
    free_after_forward: bool,
) -> None:
    """A gradient penalty trains every parameter as in the unsharded model, step after step."""

    plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    check_training(model, [loss] * 2, ranks, units=BLOCKS, **plan)


def test_accumulated_penalties(ranks: int, use_orig_params: bool) -> None:
    """Gradients of gradients are collected in ``no_sync`` like any others."""

    def accumulating(module: nn.Module, rank: int) -> Tensor:
        with no_sync(module):
            gradient_penalty(module, rank).backward()
        return gradient_penalty(module, rank)

    check_training(Stack, [accumulating] * 2, ranks, units=BLOCKS, use_orig_params=use_orig_params)


def test_backward_that_makes_a_graph(ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """After ``backward(create_graph=True)`` the gradient of the input can be differentiated; both passes add up."""

    def twice(module: nn.Module, rank: int) -> Tensor:
        x = batch(rank).requires_grad_()
        module(x).square().mean().backward(create_graph=True)
        assert x.grad is not None
        for parameter in module.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.detach()
        return x.grad.square().sum()

    plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    # Each pass is summed over ranks by itself, which is a different order of additions.
    check_training(Stack, [twice] * 2, ranks, units=BLOCKS, exact=False, **plan)


@pytest.mark.parametrize("times", [2, 3])
def test_one_graph_several_times(times: int, ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """``retain_graph=True``: each backward pass through one graph adds its gradients."""

    def step(collectives: Collectives) -> list[Grads]:
        plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
        module = sharded(Stack, collectives, units=BLOCKS, **plan)
        out = loss(module, collectives.rank)
        found = []
        for number in range(times):
            out.backward(retain_graph=number + 1 < times)
            check_at_rest(module)
            found.append(full_gradients(module))
        return found

    once = mean_gradients(seeded(Stack), loss, ranks)
    for found in run(ranks, step):
        for number, each in enumerate(found, 1):
            check_same(each, {name: None if value is None else number * value for name, value in once.items()})


def test_gradients_at_the_input(ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """``autograd.grad`` at the input, twice through one graph, is the local model's, and gives no parameter any."""

    def step(collectives: Collectives) -> list[Tensor]:
        plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
        module = sharded(Stack, collectives, units=BLOCKS, **plan)
        found = at_the_input(module, collectives.rank)
        assert all(parameter.grad is None for parameter in module.parameters())
        check_at_rest(module)
        return found

    def at_the_input(module: nn.Module, rank: int) -> list[Tensor]:
        x = batch(rank).requires_grad_()
        out = module(x)
        return [
            *torch.autograd.grad(out.square().sum(), x, retain_graph=True),
            *torch.autograd.grad(out.sum(), x),
        ]

    for rank, found in enumerate(run(ranks, step)):
        for each, expected in zip(found, at_the_input(seeded(Stack), rank), strict=True):
            assert torch.equal(each, expected)


# Gradients with respect to parameters, which summon_full_params shows


def at_parameters(module: nn.Module, rank: int) -> list[Tensor]:
    """Gradients, and a product of the Hessian with them."""
    parameters = list(module.parameters())
    slopes = torch.autograd.grad(loss(module, rank), parameters, create_graph=True)
    norm = torch.stack([slope.square().sum() for slope in slopes]).sum()
    products = torch.autograd.grad(norm, parameters)
    return [each.detach().clone() for each in (*slopes, *products)]


def test_gradients_at_parameters(ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """Summoned parameters can be differentiated by, twice over: each rank gets its own full gradients."""

    def step(collectives: Collectives) -> list[Tensor]:
        plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
        module = sharded(Stack, collectives, units=BLOCKS, **plan)
        with summon_full_params(module):
            found = at_parameters(module, collectives.rank)
        check_at_rest(module)
        return found

    names = [name for name, _ in seeded(Stack).named_parameters()]
    for rank, found in enumerate(run(ranks, step)):
        for name, each, expected in zip(names * 2, found, at_parameters(seeded(Stack), rank), strict=True):
            assert torch.equal(each, expected), name


def adapted(module: nn.Module, rank: int, steps: int = 2) -> Tensor:
    """The loss after some inner steps of gradient descent on another batch (MAML)."""
    weights: dict[str, Any] = dict(module.named_parameters())

    def at(values: dict[str, Any], x: Tensor) -> Tensor:
        out: Tensor = functional_call(module, values, (x,)).square().mean()
        return out

    for step in range(steps):
        inner = at(weights, batch(rank, step))
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        weights = {name: weights[name] - 0.25 * slope for name, slope in zip(weights, slopes, strict=True)}
    return at(weights, batch(rank, steps))


def test_inner_steps(ranks: int, use_orig_params: bool) -> None:
    """MAML: the gradient through two inner steps reaches the shards as the mean of the ranks' gradients."""

    def step(collectives: Collectives) -> Grads:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        with summon_full_params(module, writeback=False):
            adapted(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), adapted, ranks)
    for found in run(ranks, step):
        check_same(found, expected)
