"""Gradients of gradients, graphs that are gone through twice, gradients that are asked for by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam_comm import Collectives
from integration_tests.lifted.our_half import (
    Loss,
    batch,
    both_exposures,
    full_gradients,
    full_parameters,
    mean_gradients,
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
from integration_tests.parity.runs import assert_same_tensors, gradients_of

both_strategies = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
both_wrappings = pytest.mark.parametrize("units", [(), (nn.Linear,)], ids=["whole", "units"])
Units = tuple[type[nn.Module], ...]


def penalty_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss of a critic with a gradient penalty."""
    x = batch(step, rank).requires_grad_()
    score = model(x).square().mean()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    return score + (slope.norm(dim=1) - 1).square().mean()


def double_penalty_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """The same once more: third derivatives."""
    x = batch(step, rank).requires_grad_()
    score = model(x).square().mean()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return score + curvature.square().sum()


def torch_l21_penalty(group: Collectives, use_orig_params: bool) -> None:
    model = fsdp1(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
    penalty_loss(model, 0, group.rank).backward()


def torch_l21_create_graph(group: Collectives, use_orig_params: bool) -> None:
    model = fsdp1(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
    square_loss(model, 0, group.rank).backward(create_graph=True)


def torch_l22(group: Collectives, use_orig_params: bool) -> None:
    model = fsdp1(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
    loss = square_loss(model, 0, group.rank)
    loss.backward(retain_graph=True)
    loss.backward()


def torch_l23(group: Collectives, use_orig_params: bool) -> list[Tensor | None]:
    model = fsdp1(seeded(mlp), use_orig_params=use_orig_params)
    parameters = list(model.parameters())
    return list(torch.autograd.grad(square_loss(model, 0, group.rank), parameters, allow_unused=True))


@both_exposures
def test_l21_torch_has_no_gradients_of_gradients(processes: Outcomes, use_orig_params: bool) -> None:
    """L-21: a gradient penalty finds freed storage in torch, and create_graph is refused in the backward pass."""
    assert "setStorage" in processes.error(torch_l21_penalty, use_orig_params)
    assert "gradients of gradients" in processes.error(torch_l21_create_graph, use_orig_params)


@both_exposures
@both_strategies
@both_wrappings
@pytest.mark.parametrize("loss", [penalty_loss, double_penalty_loss])
def test_l21_penalties_train(loss: Loss, units: Units, strategy: str, use_orig_params: bool) -> None:
    """L-21: losses that hold gradients with respect to inputs train to the bits of the unsharded model."""

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(
            seeded(mlp),
            *units,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
        train(model, sgd(model.parameters()), group.rank, loss)
        return full_parameters(model)

    reference = seeded(mlp)
    expected = train_local(reference, sgd(reference.parameters()), loss)
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@both_exposures
@both_strategies
@both_wrappings
def test_l21_backward_of_a_backward(units: Units, strategy: str, use_orig_params: bool) -> None:
    """L-21: backward(create_graph=True) gives the gradients, and the input's can be differentiated once more."""

    def rank(group: Collectives) -> list[dict[str, Tensor | None]]:
        model = wrapped(
            seeded(mlp),
            *units,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
        x = batch(0, group.rank).requires_grad_()
        model(x).square().mean().backward(create_graph=True)
        first = full_gradients(model)
        model.zero_grad()
        slope_of(x).square().sum().backward()
        return [first, full_gradients(model)]

    def once(model: nn.Module, number: int) -> Tensor:
        x = batch(0, number).requires_grad_()
        model(x).square().mean().backward(create_graph=True)
        return slope_of(x)

    def twice(model: nn.Module, number: int) -> None:
        slope = once(model, number)
        model.zero_grad()
        slope.square().sum().backward()

    for index, backward in enumerate((once, twice)):
        reference = seeded(mlp)
        mean_gradients(reference, backward)
        for found in on_two_ranks(rank):
            assert_same_tensors(found[index], gradients_of(reference), "gradient")


def slope_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


@both_exposures
def test_l21_a_gradient_penalty_on_parameters(use_orig_params: bool) -> None:
    """L-21: inside summon_full_params a loss may hold gradients with respect to parameters, and trains."""

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        score = square_loss(model, step, rank)
        slopes = torch.autograd.grad(score, list(model.parameters()), create_graph=True)
        return score + torch.stack([slope.square().sum() for slope in slopes]).sum()

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
        optimizer = sgd(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            with FSDP.summon_full_params(model):
                loss(model, step, group.rank).backward()
            optimizer.step()
        return full_parameters(model)

    reference = seeded(mlp)
    expected = train_local(reference, sgd(reference.parameters()), loss)
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
def test_l21_maml(use_orig_params: bool) -> None:
    """L-21: a step on one batch inside the loss on another, differentiated through, trains as the unsharded model."""

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        named = dict(model.named_parameters())
        score = functional_call(model, named, batch(10 + step, rank)).square().mean()
        slopes = torch.autograd.grad(score, list(named.values()), create_graph=True)
        adapted = {name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
        return functional_call(model, adapted, batch(step, rank)).square().mean()

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(seeded(mlp), use_orig_params=use_orig_params)
        optimizer = sgd(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            with FSDP.summon_full_params(model):
                loss(model.module, step, group.rank).backward()
            optimizer.step()
        return full_parameters(model)

    reference = seeded(mlp)
    expected = train_local(reference, sgd(reference.parameters()), loss)
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
def test_l22_torch_cannot_go_through_a_graph_again(processes: Outcomes, use_orig_params: bool) -> None:
    """L-22: a second backward pass through a retained graph finds freed storage in torch."""
    assert "setStorage" in processes.error(torch_l22, use_orig_params)


@both_exposures
@both_strategies
@both_wrappings
def test_l22_a_graph_may_be_gone_through_again(units: Units, strategy: str, use_orig_params: bool) -> None:
    """L-22: three backward passes, two losses of one retained graph, add up as they do in the unsharded model."""

    def rank(group: Collectives) -> dict[str, Tensor | None]:
        model = wrapped(
            seeded(mlp),
            *units,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
        output = model(batch(0, group.rank))
        output.square().mean().backward(retain_graph=True)
        output.square().mean().backward(retain_graph=True)
        output.abs().sum().backward()
        return full_gradients(model)

    square, absolute = seeded(mlp), seeded(mlp)
    mean_gradients(square, lambda model, number: square_loss(model, 0, number).backward())
    mean_gradients(absolute, lambda model, number: model(batch(0, number)).abs().sum().backward())
    more = gradients_of(absolute)
    expected = {name: grad + grad + more[name] for name, grad in gradients_of(square).items()}
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "gradient")


def test_l23_torch_gives_nothing_for_originals(processes: Outcomes) -> None:
    """L-23: with use_orig_params=True torch.autograd.grad gives None for every parameter in torch."""
    for grads in processes.values(torch_l23, True):
        assert grads == [None] * len(list(mlp().parameters()))


def test_l23_torch_gives_a_gradient_of_another_shape_for_flat_parameters(processes: Outcomes) -> None:
    """L-23 holds for originals only: for a flat parameter torch 2.13 gives this rank's, unsharded and not reduced.

    It has not the shape of the parameter that was asked for, which is a shard.
    """
    for rank, grads in enumerate(processes.values(torch_l23, False)):
        reference = seeded(mlp)
        square_loss(reference, 0, rank).backward()
        expected = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
        (found,) = grads
        assert torch.equal(found[: expected.numel()], expected)


@both_exposures
@both_wrappings
def test_l23_gradients_by_name(units: Units, use_orig_params: bool) -> None:
    """L-23: inside summon_full_params torch.autograd.grad gives this rank's full gradients, and changes no `.grad`."""

    def rank(group: Collectives) -> tuple[dict[str, Tensor], bool]:
        model = wrapped(seeded(mlp), *units, use_orig_params=use_orig_params)
        with FSDP.summon_full_params(model):
            names, parameters = zip(*model.named_parameters(), strict=True)
            grads = torch.autograd.grad(square_loss(model, 0, group.rank), parameters)
        untouched = all(p.grad is None for p in model.parameters())
        return dict(zip(names, grads, strict=True)), untouched

    for number, (found, untouched) in enumerate(on_two_ranks(rank)):
        reference = seeded(mlp)
        square_loss(reference, 0, number).backward()
        assert_same_tensors(found, gradients_of(reference), "gradient")
        assert untouched


@both_exposures
@both_wrappings
def test_l23_training_goes_on_afterwards(units: Units, use_orig_params: bool) -> None:
    """L-23: asking for some gradients only, in between, makes no difference to training."""

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(seeded(mlp), *units, use_orig_params=use_orig_params)
        optimizer = sgd(model.parameters())
        for step in range(3):
            with FSDP.summon_full_params(model):
                last = list(model.parameters())[-1]
                torch.autograd.grad(square_loss(model, 7, group.rank), last)
            optimizer.zero_grad()
            square_loss(model, step, group.rank).backward()
            optimizer.step()
        return full_parameters(model)

    reference = seeded(mlp)
    expected = train_local(reference, sgd(reference.parameters()))
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")
