"""The wrapper beside other tools: activation checkpointing, the compiler's marks."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from each_row import each_row
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives

from .models import Batch, mlp, seeded
from .worlds import assert_same_state, inputs, on_ranks, train, train_on_mean

HERE = SingleCollectives()
LINEAR = ModuleWrapPolicy({nn.Linear})
WRAPPERS = {
    "non-reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "offload": offload_wrapper,
}


def wrap_linears(module: nn.Module, wrapper: Any) -> nn.Module:
    apply_activation_checkpointing(
        module, checkpoint_wrapper_fn=wrapper, check_fn=lambda child: isinstance(child, nn.Linear)
    )
    return module


@each_row("wrapper", WRAPPERS)
@each_row("order", ["checkpoints inside", "checkpoints around"])
def test_activation_wrappers(wrapper: str, order: str, use_orig_params: bool) -> None:
    """S-130: with torch's wrappers inside or around the units it trains to the same bits, under the same clean names."""

    def rank(world: Collectives) -> Any:
        module = seeded(mlp)
        if order == "checkpoints inside":
            model = FSDP(
                wrap_linears(module, WRAPPERS[wrapper]),
                auto_wrap_policy=LINEAR,
                use_orig_params=use_orig_params,
            )
        else:
            model = FSDP(module, auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
            apply_activation_checkpointing(
                model,
                checkpoint_wrapper_fn=WRAPPERS[wrapper],
                check_fn=lambda child: isinstance(child, FSDP) and child is not model,
            )
        batches = [x.requires_grad_() for x in inputs(world.rank)]
        train(model, torch.optim.Adam(model.parameters()), batches)
        state = model.state_dict()
        with FSDP.summon_full_params(model):
            names = [name for name, _ in model.named_parameters()]
        model.load_state_dict(state)
        return names, state

    reference = seeded(mlp)
    train_on_mean(reference, torch.optim.Adam(reference.parameters()), 2)
    for names, state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())
        assert [name.replace("_checkpoint_wrapped_module.", "") for name in names] == list(state)


@pytest.mark.parametrize("policy", [None, {nn.Linear}], ids=["whole", "policy"])
def test_marks_for_the_compiler(torch_world: None, policy: Any, use_orig_params: bool) -> None:
    """S-129: the modules that torch's FSDP1 marks for Dynamo have the same mark; all say that they compile."""

    def marks(model: nn.Module) -> dict[str, Any]:
        return {name: vars(m).get("_is_fsdp_managed_module") for name, m in model.named_modules()}

    chosen = None if policy is None else theirs.wrap.ModuleWrapPolicy(policy)
    arguments: dict[str, Any] = {"auto_wrap_policy": chosen, "use_orig_params": use_orig_params}
    mine, other = Batch(), Batch()
    found = marks(FSDP(mine, ignored_modules=[mine.norm], **arguments))
    expected = marks(
        theirs.FullyShardedDataParallel(other, ignored_modules=[other.norm], device_id=torch.device("cpu"), **arguments)
    )
    del found[""], expected[""]  # the outer wrapper itself
    assert found == expected
    compiled = [vars(module).get("_fsdp_use_orig_params") for module in mine.modules()]
    assert compiled.count(True) == list(found.values()).count(True) > 0


def test_ranks_that_run_different_units_are_told() -> None:
    """S-123, L-01: without any switch, units of one size in another order are an error that names both, on every rank."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
            return (self.left if left else self.right)(x)

    def rank(world: Collectives) -> str:
        model = FSDP(Either(), auto_wrap_policy=LINEAR)
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(1, 2), left=world.rank == 0).sum().backward()
        return str(caught.value)

    for message in on_ranks(2, rank):
        assert "left" in message
        assert "right" in message
