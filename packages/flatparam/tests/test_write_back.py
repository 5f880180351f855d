"""Parameters and gradients that the user replaces, freezes or drops between steps, with `use_orig_params=True`."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_core import FlatParamError

from .models import Transformer, mlp, seeded
from .worlds import assert_same_state, inputs, on_ranks, train_on_mean

LINEAR = ModuleWrapPolicy({nn.Linear})


@each_row("how", ["data", "object"])
@each_row("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_new_values_are_taken_over(how: str, strategy: ShardingStrategy) -> None:
    """S-043: full tensors given to parameters between steps, as data or as new objects, are what is trained on."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), sharding_strategy=strategy, auto_wrap_policy=LINEAR, use_orig_params=True)
        model(inputs(world.rank)[0]).square().mean().backward()
        fresh_model = seeded(mlp, seed=8)
        for layer in (0, 2, 4):
            fresh = fresh_model[layer]
            for name, parameter in model.module[layer].module.named_parameters():
                value = fresh.get_parameter(name).detach().clone()
                if how == "data":
                    parameter.data = value
                else:
                    setattr(model.module[layer].module, name, nn.Parameter(value))
        optimizer = torch.optim.Adam(model.parameters())
        for x in inputs(world.rank):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    reference = seeded(mlp, seed=8)
    train_on_mean(reference, torch.optim.Adam(reference.parameters()), 2)
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


def test_another_shape_is_refused() -> None:
    """S-043: data of another shape raises at the next forward, naming the parameter and both shapes."""

    def rank(world: Collectives) -> None:
        model = FSDP(mlp(), use_orig_params=True)
        model.module[0].weight.data = torch.zeros(4, 4)
        with pytest.raises(RuntimeError, match=r"'0\.weight'.*\(5, 3\).*\(4, 4\)"):
            model(torch.ones(2, 3))

    on_ranks(2, rank)


def test_another_tie_is_refused() -> None:
    """S-043: which modules share a parameter cannot change; torch raises NotImplementedError."""

    def rank(world: Collectives) -> None:
        model = FSDP(Transformer(), use_orig_params=True)
        model.head.weight = nn.Parameter(torch.zeros(7, 4))
        with pytest.raises(FlatParamError, match=r"not under its other name 'head\.weight'"):
            model(torch.zeros(1, 2, dtype=torch.long))

    on_ranks(2, rank)


def test_a_gradient_that_was_given_counts() -> None:
    """S-043: a gradient of the sharded shape that the user sets is what the optimizer steps on, and what is added to."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), use_orig_params=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model(inputs(world.rank)[0]).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        return model.state_dict()

    reference = seeded(mlp)
    for number in range(2):
        (reference(inputs(number)[0]).square().mean() / 2).backward()
    for parameter in reference.parameters():
        parameter.grad += 1
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


def assert_only_second_inputs_count(states: Sequence[Any]) -> None:
    """Check that each rank's state is that after one step on the second inputs of both ranks."""
    reference = seeded(mlp)
    for number in range(2):
        (reference(inputs(number)[1]).square().mean() / 2).backward()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    for state in states:
        assert_same_state(state, reference.state_dict())


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad(set_to_none: bool, use_orig_params: bool) -> None:
    """S-044: after `zero_grad`, of the model as of an optimizer, no gradient (or zeros) is left to add to."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for clear in (model.zero_grad, optimizer.zero_grad):
            model(inputs(world.rank)[0]).square().mean().backward()
            clear(set_to_none=set_to_none)
            grads = [parameter.grad for parameter in model.parameters()]
            assert all(grad is None or not (set_to_none or grad.any()) for grad in grads)
            assert set_to_none or any(grad is not None for grad in grads)
        model(inputs(world.rank)[1]).square().mean().backward()
        optimizer.step()
        return model.state_dict()

    assert_only_second_inputs_count(on_ranks(2, rank))


@each_row("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@each_row("set_to_none", [False, True])
@each_row("of", ["model", "optimizer", "optimizer of what is here"])
def test_zero_grad_after_no_sync(of: str, set_to_none: bool, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """Micro-batches that `no_sync` has collected are dropped by `zero_grad`, as in torch, on every rank."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params, sharding_strategy=strategy)
        held = [p for p in model.parameters() if of != "optimizer of what is here" or p.numel()]
        optimizer = torch.optim.SGD(held, lr=0.5)
        for _ in range(2):
            with model.no_sync():
                model(inputs(world.rank)[0]).square().mean().backward()
            (model if of == "model" else optimizer).zero_grad(set_to_none=set_to_none)
        model(inputs(world.rank)[1]).square().mean().backward()
        optimizer.step()
        return model.state_dict()

    assert_only_second_inputs_count(on_ranks(2, rank))


def test_some_parameters_of_a_unit_are_frozen_and_thawed() -> None:
    """S-044: `requires_grad` of a single original counts from the next forward on; all frozen means no gradient."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), use_orig_params=True)
        found = []
        for frozen in (set(), {"0.weight", "4.bias"}, {name for name, _ in mlp().named_parameters()}, set()):
            for name, parameter in model.module.named_parameters():
                parameter.requires_grad_(name not in frozen)
            model.zero_grad()
            x = inputs(world.rank)[0].requires_grad_()
            model(x).sum().backward()
            here = {name for name, p in model.module.named_parameters() if p.numel()}
            found.append({name for name in here if model.module.get_parameter(name).grad is None} == frozen & here)
        return found

    assert on_ranks(2, rank) == [[True] * 4] * 2


def test_the_same_hyperparameters_per_parameter() -> None:
    """S-023: groups by the original parameters' names train to the bits of the same groups of the unwrapped model."""

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        decay = [p for name, p in model.named_parameters() if name.endswith("weight")]
        rest = [p for name, p in model.named_parameters() if name.endswith("bias")]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0}])

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=True)
        optimizer = groups(model)
        for x in inputs(world.rank):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    reference = seeded(mlp)
    train_on_mean(reference, groups(reference), 2)
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())
