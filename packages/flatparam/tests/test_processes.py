"""The same wrapper over torch's process groups and meshes, in real processes."""

import functools
import itertools
import sys
import warnings
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, StateDictType
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

from .models import mlp, seeded
from .worlds import assert_same_state, train

pytestmark = pytest.mark.processes


def inputs(rank: int) -> list[torch.Tensor]:
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * n + rank)) for n in range(3)]


def trained(ranks: Collectives, **where: Any) -> Any:
    """The model's state after three steps, each rank on batches of its own."""
    model = FSDP(seeded(mlp), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **where)
    train(model, torch.optim.Adam(model.parameters()), inputs(ranks.rank))
    return model.state_dict()


def ways_to_name_the_ranks(ranks: Collectives) -> Any:
    """Three models over the same two ranks, and what each says its group is."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = FSDP(mlp(), device_mesh=mesh)
    facts = [
        model.process_group is mesh.get_group(0),
        FSDP(mlp()).process_group is dist.group.WORLD,
        (model.rank, model.world_size) == (dist.get_rank(), 2),
    ]
    states = [
        trained(ranks),
        trained(ranks, device_mesh=mesh, use_orig_params=True),
        trained(ranks, process_group=dist.new_group([0, 1]), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    ]
    return facts, states


def test_groups_and_meshes_of_one_dimension() -> None:
    """S-011, S-025: the default group, a group and a 1-D mesh train alike: as one process on the mean of the losses."""
    reference = seeded(mlp)
    optimizer = torch.optim.Adam(reference.parameters())
    for batches in zip(inputs(0), inputs(1), strict=True):
        optimizer.zero_grad()
        (sum(reference(x).square().mean() for x in batches) / 2).backward()
        optimizer.step()
    for facts, states in run_processes(2, ways_to_name_the_ranks):
        assert facts == [True, True, True]
        for state in states:
            assert_same_state(state, reference.state_dict())


def a_group_of_one_of_two(ranks: Collectives) -> Any:
    """Each rank trains alone in a group of its own."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    return trained(ranks, process_group=groups[ranks.rank])


def test_a_group_that_is_not_the_world() -> None:
    """S-011: only the ranks of the group share; the two groups come to different models."""
    for rank, state in enumerate(run_processes(2, a_group_of_one_of_two)):
        reference = seeded(mlp)
        train(reference, torch.optim.Adam(reference.parameters()), inputs(rank))
        assert_same_state(state, reference.state_dict())


def meshes_and_pairs_that_are_refused(ranks: Collectives) -> list[str]:
    """The messages."""
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    three = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    groups = (dist.group.WORLD, dist.group.WORLD)
    messages = []
    for kind, where in (
        (ValueError, {"device_mesh": two}),
        (ValueError, {"process_group": groups}),
        (ValueError, {"device_mesh": three}),
        (ValueError, {"device_mesh": two["shard"], "process_group": dist.group.WORLD}),
    ):
        module = mlp()
        before = [id(p) for p in module.parameters()]
        with pytest.raises(kind) as caught:
            FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **where)
        assert [id(p) for p in module.parameters()] == before
        messages.append(str(caught.value))
    assert FSDP(mlp(), device_mesh=two["replicate"]).world_size == 2
    return messages


def test_meshes_of_more_dimensions() -> None:
    """S-011, S-025: a 2-D mesh and a pair of groups are refused for FULL_SHARD; a slice of the mesh is taken."""
    for hybrid_mesh, hybrid_pair, three, both in run_processes(2, meshes_and_pairs_that_are_refused):
        assert "one dimension" in hybrid_mesh
        assert "a pair of groups is for the hybrid strategies" in hybrid_pair
        assert "found 3" in three
        assert "exclude each other" in both


def spoiled_norm(ranks: Collectives, bad: int) -> tuple[float, bool]:
    """The largest element of gradients of which those of rank `bad` are not numbers; and whether an error says so."""
    model = FSDP(seeded(mlp), use_orig_params=True)
    model(torch.ones(4, 3)).sum().backward()
    if ranks.rank == bad:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.nan)
    raised = False
    try:
        model.clip_grad_norm_(1.0, torch.inf, error_if_nonfinite=True)
    except RuntimeError:
        raised = True
    return model.clip_grad_norm_(1.0, torch.inf).item(), raised


@pytest.mark.parametrize("bad", [0, 1])
def test_a_norm_that_is_no_number_on_one_rank(bad: int) -> None:
    """gloo's maximum of numbers and of what is no number depends on the rank; the norm of order infinity does not."""
    for norm, raised in run_processes(2, spoiled_norm, bad):
        assert norm != norm
        assert raised


def warned_of(ranks: Collectives, use_orig_params: bool) -> list[str]:
    """The texts of the warnings while a sharded state is saved and loaded."""
    model = FSDP(seeded(mlp), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, inputs(ranks.rank))
    with (
        warnings.catch_warnings(record=True) as caught,
        FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT),
    ):
        warnings.simplefilter("always")
        model.load_state_dict(model.state_dict())
        state = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    return [f"{each.filename}:{each.lineno}: {each.message}" for each in caught]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_sharded_state_warns_of_nothing(use_orig_params: bool) -> None:
    """Torch warns that its `ShardedTensor` is deprecated, which no user of ours can do anything about."""
    assert run_processes(2, warned_of, use_orig_params) == [[], []]


def stepped_by_zero(ranks: Collectives, use_orig_params: bool) -> tuple[Any, Any]:
    """The states after three steps of copies: of an optimizer that shards its state, and of an ordinary one."""
    warnings.simplefilter("ignore")
    states = []
    for kind in (functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam), torch.optim.Adam):
        model = FSDP(
            seeded(mlp),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            use_orig_params=use_orig_params,
        )
        train(model, kind(model.parameters(), lr=0.1), inputs(ranks.rank))
        states.append(model.state_dict())
    return states[0], states[1]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_torchs_sharding_of_optimizers_beside_copies(use_orig_params: bool) -> None:
    """Each rank steps some of the parameters of ZeroRedundancyOptimizer, and that is no divergence."""
    for found, expected in run_processes(2, stepped_by_zero, use_orig_params):
        assert_same_state(found, expected)


def interrupted_at(call: int) -> Any:
    """Return a profiler that raises KeyboardInterrupt when a function begins to wait for a collective, at that call."""
    begun = itertools.count(1)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        is_wait = frame.f_code.co_name == "wait" and frame.f_code.co_filename.endswith("process_group/engine.py")
        if event == "call" and is_wait and next(begun) == call:
            sys.setprofile(None)
            raise KeyboardInterrupt("on purpose")

    return profile


def losses_after_an_interrupt(ranks: Collectives, use_orig_params: bool) -> tuple[list[list[float]], list[float]]:
    """Return the losses of steps after an interrupt in one wait, for each wait of a step, and those without."""

    def step(model: FSDP, optimizer: torch.optim.Optimizer, seed: int) -> float:
        loss = model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed + ranks.rank))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def losses(call: int) -> list[float]:
        model = FSDP(seeded(mlp), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, 10)
        if call:
            sys.setprofile(interrupted_at(call))
            with pytest.raises(KeyboardInterrupt):
                step(model, optimizer, 20)
            optimizer.zero_grad()
        return [step(model, optimizer, seed) for seed in (30, 40)]

    # So often that freed memory which the backend still writes to would not go unseen.
    return [losses(1 + at % 4) for at in range(24)], losses(0)


def test_an_interrupt_while_ranks_wait(use_orig_params: bool) -> None:
    """Ctrl-C before a wait ends the pass alone: what the backend reads and writes stays until it is done with it."""
    for found, expected in run_processes(2, losses_after_an_interrupt, use_orig_params):
        assert found == [expected] * len(found)
