"""Optimizers that step inside the backward pass, attached by torch's `_apply_optimizer_in_backward`."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from flatparam import CPUOffload, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives
from flatparam_core import FlatParamError

from ..models import mlp, seeded
from ..worlds import assert_same_state, inputs, on_ranks, train_on_mean

LINEAR = ModuleWrapPolicy({nn.Linear})
ADAM = {"lr": 0.05}


def attached(module: nn.Module) -> nn.Module:
    _apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), ADAM)
    return module


@pytest.mark.parametrize("policy", [None, LINEAR], ids=["whole", "policy"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"cpu_offload": CPUOffload(True)}],
    ids=str,
)
def test_training_is_that_of_an_optimizer_outside(arguments: dict[str, Any], policy: Any) -> None:
    """S-045: backward alone trains to the bits of stepping after each backward."""

    def rank(world: Collectives) -> Any:
        model = FSDP(attached(seeded(mlp)), auto_wrap_policy=policy, use_orig_params=True, **arguments)
        for x in inputs(world.rank):
            model(x).square().mean().backward()
            assert all(parameter.grad is None for parameter in model.parameters())
        return model.state_dict()

    reference = seeded(mlp)
    train_on_mean(reference, torch.optim.Adam(reference.parameters(), **ADAM), 2)
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


def test_gradients_are_not_held_until_the_end() -> None:
    """S-045: a unit's gradients are stepped on and dropped right after its reduction, before the first layers have any."""
    found: list[Any] = []
    module = attached(seeded(mlp))
    model = FSDP(module, SingleCollectives(), auto_wrap_policy=LINEAR, use_orig_params=True)
    last = list(model.parameters())[-1]
    before = last.detach().clone()
    module[0].module.register_full_backward_pre_hook(
        lambda *_: found.append((last.grad, torch.equal(last.detach(), before)))
    )
    model(torch.ones(2, 3)).sum().backward()
    assert found == [(None, False)]


def test_accumulation_steps_once() -> None:
    """S-045, S-041: inside `no_sync` nothing is stepped; the synchronised backward steps on the sum."""
    model = FSDP(attached(seeded(mlp)), SingleCollectives(), auto_wrap_policy=LINEAR, use_orig_params=True)
    first, second = inputs(0, 2)
    before = model.state_dict()
    with model.no_sync():
        model(first).sum().backward()
    assert_same_state(model.state_dict(), before)
    model(second).sum().backward()
    reference = seeded(mlp)
    optimizer = torch.optim.Adam(reference.parameters(), **ADAM)
    for x in (first, second):
        reference(x).sum().backward()
    optimizer.step()
    assert_same_state(model.state_dict(), reference.state_dict())


def test_without_the_original_parameters() -> None:
    """S-045: with `use_orig_params=False` the optimizers have nothing to hold, and the first forward says so."""
    model = FSDP(attached(mlp()), SingleCollectives(), use_orig_params=False)
    with pytest.raises(FlatParamError, match="use_orig_params=True"):
        model(torch.ones(2, 3))
