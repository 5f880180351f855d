"""The wrapper beside other tools: activation checkpointing, the compiler's marks, gathering by hand, states by name."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam.wrapper import training_state
from flatparam.wrapper.training_state import HandleTrainingState, TrainingState
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


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("order", ["checkpoints inside", "checkpoints around"])
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
        theirs.FullyShardedDataParallel(
            other, ignored_modules=[other.norm], device_id=torch.device("cpu"), **arguments
        )
    )
    del found[""], expected[""]  # the outer wrapper itself
    assert found == expected
    compiled = [vars(module).get("_fsdp_use_orig_params") for module in mine.modules()]
    assert compiled.count(True) == list(found.values()).count(True) > 0


@pytest.mark.parametrize("async_op", [False, True])
def test_gathering_by_hand(async_op: bool, use_orig_params: bool) -> None:
    """S-072: `_unshard` has full parameters in place, at once or once its handle was waited for; then it trains as ever."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(model.parameters())
        unit = model.module[0]
        handle = unit._unshard(async_op)
        if async_op:
            assert isinstance(handle, training_state.UnshardHandle)
            handle.wait()
            handle.wait()
        else:
            assert handle is None
        unit._wait_unshard_streams_on_current_stream()
        assert torch.equal(unit.module.weight.detach(), seeded(mlp)[0].weight.detach())
        train(model, optimizer, inputs(world.rank))
        return model.state_dict()

    reference = seeded(mlp)
    train_on_mean(reference, torch.optim.Adam(reference.parameters()), 2)
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


@pytest.mark.parametrize("name", ["TrainingState", "HandleTrainingState"])
def test_the_states_are_torchs(name: str) -> None:
    """S-073: the names of what a wrapper and its flat parameter are doing are torch's."""
    expected = getattr(__import__("torch.distributed.fsdp._common_utils", fromlist=[name]), name)
    assert [member.name for member in getattr(training_state, name)] == [member.name for member in expected]


def test_the_states_of_a_step() -> None:
    """S-073: idle, forward, backward and summoned, as they are told by a unit."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model = FSDP(module, HERE)
    seen: list[tuple[TrainingState, HandleTrainingState]] = []

    def note(*_: Any) -> None:
        seen.append((TrainingState.of(model._unit), HandleTrainingState.of(model._unit)))

    module[0].register_forward_hook(note)
    module[1].register_full_backward_hook(note)
    note()
    model(torch.ones(1, 2)).sum().backward()
    note()
    with FSDP.summon_full_params(model):
        note()
    passing = TrainingState.FORWARD_BACKWARD
    assert seen == [
        (TrainingState.IDLE, HandleTrainingState.IDLE),
        (passing, HandleTrainingState.FORWARD),
        (passing, HandleTrainingState.BACKWARD_PRE),
        (TrainingState.IDLE, HandleTrainingState.IDLE),
        (TrainingState.SUMMON_FULL_PARAMS, HandleTrainingState.SUMMON_FULL_PARAMS),
    ]


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
