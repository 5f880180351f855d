"""A model of many small parameters, its optimizer in two groups, and the plain ones to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from flatparam_comm import Collectives, SingleCollectives
from flatparam_runtime import units_in

from .beneath import full_parameters, mean_gradients, seeded, sharded

HERE = SingleCollectives()
STEPS = 3
KINDS: Any = [
    (optim.ASGD, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.Adam, {"foreach": True, "maximize": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": True, "amsgrad": True}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.NAdam, {"decoupled_weight_decay": True}),
    (optim.NAdam, {"foreach": True}),
    (optim.RAdam, {"weight_decay": 0.1}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Rprop, {}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "foreach": True, "maximize": True}),
]
"""Every optimizer that treats each element alone, and ways to make it."""


def net() -> nn.Sequential:
    """Six weights and six biases whose sizes leave padding between them and split unevenly."""
    widths = [3, 5, 7, 2, 9, 4, 1]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for weights, none for biases."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0},
    ]


def sharded_net(
    ranks: Collectives = HERE,
    make: Callable[[], nn.Module] = net,
    *,
    original: bool = True,
    each: bool = False,
) -> nn.Module:
    """The seeded module as one unit, or with a unit for each of its children too."""
    units = [name for name, _ in make().named_children()] if each else []
    return sharded(make, ranks, units=units, use_orig_params=original)


def inputs(rank: int, count: int = STEPS) -> list[Tensor]:
    """The batches of a rank."""
    seeds = (100 * step + rank for step in range(count))
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def train(model: nn.Module, optimizer: optim.Optimizer, batches: Sequence[Tensor]) -> None:
    """One step on each batch."""
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def train_on_mean(model: nn.Module, optimizer: optim.Optimizer, ranks: int, steps: int = STEPS) -> None:
    """Train a local module on the mean of the gradients that the ranks' batches give."""
    for step in range(steps):
        optimizer.zero_grad()
        gradients = mean_gradients(model, lambda each, rank, step=step: each(inputs(rank)[step]).square().mean(), ranks)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()


def adamw(model: nn.Module, **how: Any) -> optim.Optimizer:
    return optim.AdamW(groups(model), lr=0.1, **how)


def trained(model: nn.Module, optimizer: optim.Optimizer, count: int = STEPS, seed: int = 0) -> None:
    train(model, optimizer, inputs(seed, count))


def pair(**how: Any) -> tuple[nn.Module, optim.Optimizer, nn.Module, optim.Optimizer]:
    """A sharded model of one rank and a plain one, each with its optimizer."""
    model, plain = sharded_net(), seeded(net)
    return model, adamw(model, **how), plain, adamw(plain, **how)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the full parameters of a model, sharded or plain; every rank calls it."""
    if units_in(model):
        return full_parameters(model)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_values(model: nn.Module, expected: nn.Module) -> None:
    """Assert that both have the same parameters, in the bits."""
    found, wanted = values_of(model), values_of(expected)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def assert_same_training(
    model: nn.Module, optimizer: optim.Optimizer, plain: nn.Module, expected: optim.Optimizer
) -> None:
    """Assert that both have the same parameters, and the same state of each, in the bits."""
    assert_same_values(model, plain)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        found, wanted = optimizer.state.get(mine, {}), expected.state.get(theirs, {})
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            assert torch.equal(found[name].flatten(), value.flatten()), name


def assert_clean(optimizer: optim.Optimizer) -> None:
    """Assert that groups and state know the model's parameters and nothing else."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in optimizer.state} <= held
    assert all(type(p) is nn.Parameter for group in optimizer.param_groups for p in group["params"])
    optimizer.state_dict()
