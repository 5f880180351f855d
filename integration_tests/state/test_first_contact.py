"""What clients do with state that our own programs do not: late wrappers, states of other makers, missing parameters."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TheirFSDP
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flatparam import StateDictType
from flatparam_comm import Collectives
from integration_tests.state.comparing import assert_model, assert_optimizer, assert_same
from integration_tests.state.ours import FSDP, full_state, numbers_of, ours, settings_of
from integration_tests.state.sample import UNITS, adamw, build, loss_of, train, trained
from integration_tests.state.torch_files import Files, fsdp1
from integration_tests.state.worlds import on_ranks

BOTH = [False, True]


def checkpoint_late(model: nn.Module) -> None:
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda child: isinstance(child, UNITS)
    )


@on_ranks(2, originals=BOTH, form=["full", "sharded", "chunked", "dtensor", "local"], both=BOTH)
def test_loading_after_late_activation_checkpointing(
    group: Collectives, files: Files, originals: bool, form: str, both: bool
) -> None:
    """A state of any form loads after `apply_activation_checkpointing` inside the units, of one side or both."""
    source, target = ours(build(seed=3), originals, form), ours(build(seed=4), originals, form)
    checkpoint_late(target)
    if both:
        checkpoint_late(source)
    target.load_state_dict(source.state_dict())
    assert_same(full_state(target), full_state(ours(build(seed=3), originals)))
    loss_of(target, 0, group.rank).backward()


@on_ranks(2, originals=BOTH, offloads=BOTH)
def test_a_local_state_around_a_checkpoint_wrapper(
    group: Collectives, files: Files, originals: bool, offloads: bool
) -> None:
    """The local state of a unit whose module is torch's wrapper for activation checkpointing loads into the same model."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        wrap = offload_wrapper if offloads else checkpoint_wrapper
        inner = FSDP(wrap(nn.Linear(3, 3)), use_orig_params=originals)
        return FSDP(nn.Sequential(inner, nn.Linear(3, 3)), use_orig_params=originals)

    source, target = make(0), make(1)
    expected = full_state(source)
    for model in (source, target):
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    target.load_state_dict(source.state_dict())
    FSDP.set_state_dict_type(target, StateDictType.FULL_STATE_DICT)
    assert_same(full_state(target), expected)


@on_ranks(2, originals=BOTH)
def test_parameters_in_nobodys_optimizer(group: Collectives, files: Files, originals: bool) -> None:
    """The older methods, without an optimizer, pass over parameters that no unit holds and no state is about."""
    results = []
    for wrapper, wrap in ((FSDP, ours), (TheirFSDP, fsdp1)):
        module = build()
        model = wrap(module, originals, ignored_modules=[module.head])
        alone = {id(p) for p in module.head.parameters()}
        optimizer = adamw([p for p in model.parameters() if id(p) not in alone])
        train(model, optimizer, group.rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            full = wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)
            sharded = wrapper.sharded_optim_state_dict(model, optimizer)
            whole = wrapper.shard_full_optim_state_dict(full, model)
            parts = wrapper.flatten_sharded_optim_state_dict(sharded, model, optimizer)
        results.append([{key: set(value) for key, value in each["state"].items()} for each in (whole, parts)])
    mine, theirs = results
    assert mine == theirs


@on_ranks(2, originals=BOTH)
def test_a_sharded_tensor_of_an_unmanaged_parameter(group: Collectives, files: Files, originals: bool) -> None:
    """`flatten_sharded_optim_state_dict` gives a `ShardedTensor` back as it is, if no unit holds the parameter."""
    module = build()
    model = ours(module, originals, units=(), ignored_modules=[module.codec])
    optimizer = adamw(model.parameters())
    train(model, optimizer, group.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        state = FSDP.sharded_optim_state_dict(model, optimizer)
        name = "codec.encode.weight"
        made = FSDP.sharded_optim_state_dict(model, optimizer)["state"]["head.weight"]["exp_avg"]
        assert isinstance(made, ShardedTensor)
        state["state"][name]["exp_avg"] = made
        loaded = FSDP.flatten_sharded_optim_state_dict(state, model, optimizer)
    assert any(values.get("exp_avg") is made for values in loaded["state"].values())


@on_ranks(2, originals=BOTH, form=["full", "sharded", "chunked", "dtensor"])
def test_resuming_without_the_state_of_what_is_elsewhere(
    group: Collectives, files: Files, originals: bool, form: str
) -> None:
    """A rank that has nothing of a parameter gets no state of it, as with FSDP1, and what is saved after is whole."""
    model = ours(build(), originals, form)
    optimizer = adamw(model.parameters())
    with FSDP.state_dict_type(model, *settings_of("full")):
        model.load_state_dict(trained().model)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, numbers_of(False)))
    saved = FSDP.optim_state_dict(model, optimizer)
    again = adamw(model.parameters())
    again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, saved))
    for parameter in model.parameters():
        wanted = parameter.requires_grad and (parameter.numel() > 0 or not originals)
        assert (parameter in again.state) == wanted
    with FSDP.state_dict_type(model, *settings_of("full")):
        assert_optimizer(FSDP.optim_state_dict(model, again), trained().optimizer)
    assert_model(full_state(model), trained().model)


@on_ranks(2)
def test_empty_states_beside_fsdp1(group: Collectives, files: Files) -> None:
    """Of originals, ours has a gradient and a state for exactly those for which FSDP1 has one."""
    found: list[Any] = []
    for model in (ours(build(), True), fsdp1(build(), True)):
        optimizer = adamw(model.parameters())
        train(model, optimizer, group.rank)
        loss_of(model, 5, group.rank).backward()
        facts = [(p.grad is None, p in optimizer.state) for p in model.parameters() if not p.numel()]
        found.append((len(facts) > 0, {*facts}))
    assert found == [(True, {(True, False)})] * 2


@on_ranks(2, originals=BOTH)
def test_starting_alike_with_tensor_parallelism(group: Collectives, files: Files, originals: bool) -> None:
    """`sync_module_states=True` sends what `DTensor` parameters and buffers hold: every rank has rank 0's values after it."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(group.rank)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    module.register_buffer("shift", distribute_tensor(torch.full((2,), 1.0 + group.rank), mesh["tp"], [Replicate()]))
    model = FSDP(module, device_mesh=mesh["dp"], sync_module_states=True, use_orig_params=originals)
    assert_same(model.module.shift.to_local(), torch.ones(2))
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with FSDP.summon_full_params(model):
        for name, parameter in model.module.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            assert_same(whole.detach(), expected.get_parameter(name).detach(), name)
