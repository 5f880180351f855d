"""FSDP1's private names of a wrapper: its handle and flat parameter, its states, and gathering by hand."""

from typing import Any

import torch
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import UnshardHandle
from flatparam.wrap import ModuleWrapPolicy
from flatparam_clients import handle_view
from flatparam_clients.handle_view import HandleTrainingState, TrainingState
from flatparam_clients.handle_view import HandleView as FlatParamHandle
from flatparam_comm import Collectives, SingleCollectives
from flatparam_core import FlatParameter
from packages.flatparam.tests.models import Block, Transformer, mlp, seeded
from packages.flatparam.tests.worlds import assert_same_state, inputs, on_ranks, train, train_on_mean

HERE = SingleCollectives()
LINEAR = ModuleWrapPolicy({nn.Linear})


def test_flat_parameters_carry_names_and_marks() -> None:
    """One `_flat_param` per unit, of torch's type name, with `_fqns`, and marked as flattened."""
    model = FSDP(seeded(Transformer), HERE, auto_wrap_policy=ModuleWrapPolicy({Block}))
    for wrapper in FSDP.fsdp_modules(model):
        flat = wrapper._flat_param
        assert isinstance(flat, FlatParameter)
        assert isinstance(flat, nn.Parameter)
        assert flat._fsdp_flattened
        assert wrapper._has_params
        assert wrapper._handle == FlatParamHandle(wrapper._unit, wrapper._unit.handles[0])
        assert wrapper._handle.flat_param is flat
    assert list(model._flat_param._fqns) == [
        "embed.weight",
        "extras.norm.weight",
        "extras.norm.bias",
        "extras.scale.weight",
        "extras.scale.bias",
    ]
    assert list(model.blocks[0]._flat_param._fqns) == [name for name, _ in Block().named_parameters()]


def test_the_names_of_a_unit_without_parameters() -> None:
    """A wrapper whose parameters are all in units below has no handle and no flat parameter."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = FSDP(module, HERE, auto_wrap_policy=LINEAR)
    assert (model._has_params, model._flat_param, model._handle) == (False, None, None)


@each_row("async_op", [False, True])
def test_gathering_by_hand(async_op: bool, use_orig_params: bool) -> None:
    """S-072: `_unshard` has full parameters in place, at once or once its handle was waited for; then it trains as ever."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(model.parameters())
        unit = model.module[0]
        handle = unit._unshard(async_op)
        if async_op:
            assert isinstance(handle, UnshardHandle)
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


@each_row("name", ["TrainingState", "HandleTrainingState"])
def test_the_states_are_torchs(name: str) -> None:
    """S-073: the names of what a wrapper and its flat parameter are doing are torch's."""
    expected = getattr(__import__("torch.distributed.fsdp._common_utils", fromlist=[name]), name)
    assert [member.name for member in getattr(handle_view, name)] == [member.name for member in expected]


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
