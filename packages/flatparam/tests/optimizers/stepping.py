"""A model of many small parameters, its optimizer in two groups, and the plain ones to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from flatparam import FullyShardedDataParallel as FSDP
from flatparam_comm import Collectives, SingleCollectives

from ..models import seeded
from ..worlds import assert_same_state, inputs, train

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


def wrapped(make: Callable[[], nn.Module] = net, ranks: Collectives | None = None, **how: Any) -> FSDP:
    return FSDP(seeded(make), ranks, use_orig_params=True, **how)


def adamw(model: nn.Module, **how: Any) -> optim.Optimizer:
    return optim.AdamW(groups(model), lr=0.1, **how)


def trained(model: nn.Module, optimizer: optim.Optimizer, count: int = STEPS, seed: int = 0) -> None:
    train(model, optimizer, inputs(seed, count))


def pair(**how: Any) -> tuple[FSDP, optim.Optimizer, nn.Module, optim.Optimizer]:
    """A wrapped model of one rank and a plain one, each with its optimizer."""
    model, plain = wrapped(ranks=HERE), seeded(net)
    return model, adamw(model, **how), plain, adamw(plain, **how)


def assert_same_training(
    model: FSDP, optimizer: optim.Optimizer, plain: nn.Module, expected: optim.Optimizer
) -> None:
    """The same parameters and the same state of each, in the bits."""
    assert_same_state(model.state_dict(), plain.state_dict())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        found, wanted = optimizer.state.get(mine, {}), expected.state.get(theirs, {})
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            assert torch.equal(found[name].flatten(), value.flatten()), name


def assert_clean(optimizer: optim.Optimizer) -> None:
    """Groups and state know the model's parameters and nothing else."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in optimizer.state} <= held
    assert all(type(p) is nn.Parameter for group in optimizer.param_groups for p in group["params"])
    optimizer.state_dict()
