"""Full states of models that tensor parallelism spreads too: whole tensors, which any of the ways to load takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatparam
from flatparam.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from flatparam_comm import Collectives
from flatparam_simdev.worlds import run_processes

from .small import mesh_of

pytestmark = pytest.mark.processes

WIDTH = 4
WORDS = 5
"""Words of a vocabulary, which two ranks hold in parts of three and two."""


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)), nn.Linear(WIDTH, WORDS))


def in_place(model: nn.Module, mesh: Any) -> nn.Module:
    for module in (model[0], model):  # type: ignore[index]
        flatparam.fully_shard(module, mesh=mesh)
    return model


def wrapped(use_orig_params: bool, model: nn.Module, mesh: Any) -> nn.Module:
    policy = flatparam.wrap.ModuleWrapPolicy({nn.Linear})
    return flatparam.FullyShardedDataParallel(
        model, device_mesh=mesh, auto_wrap_policy=policy, use_orig_params=use_orig_params
    )


DOORS: dict[str, Callable[..., nn.Module]] = {
    "in place": in_place,
    "originals": lambda *given: wrapped(True, *given),
    "flat": lambda *given: wrapped(False, *given),
}


def spread(door: str, mesh: Any, seed: int = 0) -> nn.Module:
    """Return the model of a seed over both dimensions of the mesh."""
    plan = {"0.0": ColwiseParallel(), "0.1": RowwiseParallel(), "1": ColwiseParallel(use_local_output=False)}
    model = parallelize_module(plain(seed), mesh["tensor"], plan)
    return DOORS[door](model, mesh["data"])


def loss_of(model: nn.Module) -> Tensor:
    out: Any = model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))
    whole: Tensor = out.full_tensor() if isinstance(out, DTensor) else out
    return whole.square().mean()


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def expected() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of one process, by name."""
    model = plain()
    optimizer = stepped(model)
    return dict(model.state_dict()), {name: optimizer.state[p] for name, p in model.named_parameters()}


def assert_whole(found: Any, states: Any) -> None:
    weights, moments = expected()
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert not isinstance(found[name], DTensor)
        torch.testing.assert_close(found[name], weight)
        assert not isinstance(states["state"][name]["exp_avg"], DTensor)
        torch.testing.assert_close(states["state"][name]["exp_avg"], moments[name]["exp_avg"])


def saved(ranks: Collectives, door: str) -> None:
    mesh = mesh_of(2, 2)
    model = spread(door, mesh)
    optimizer = stepped(model)
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        found, states = get_state_dict(model, optimizer, options=options)
        if offload and ranks.rank:
            assert (found, states) == ({}, {})
        else:
            assert_whole(found, states)


@pytest.mark.parametrize("door", DOORS)
def test_a_full_state_is_whole(door: str) -> None:
    """Every rank gets all of each parameter and moment, or the first rank of all alone, with `cpu_offload`."""
    run_processes(4, saved, door)


def loaded(ranks: Collectives, door: str) -> None:
    mesh = mesh_of(2, 2)
    weights, moments = expected()
    groups = [{"params": list(weights), "lr": 0.01}]
    for from_first in (False, True):
        model = spread(door, mesh, seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
        is_here = not (from_first and ranks.rank)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=dict(weights) if is_here else {},
            optim_state_dict={"state": moments, "param_groups": groups} if is_here else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first),
        )
        assert_whole(*get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))


@pytest.mark.parametrize("door", DOORS)
def test_whole_tensors_are_loaded(door: str) -> None:
    """A state of one process is loaded by every rank, or sent by the first one; each rank keeps its part."""
    run_processes(4, loaded, door)


def losses_of(model: nn.Module) -> list[float]:
    """Train three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(ranks: Collectives, door: str) -> list[float]:
    return losses_of(spread(door, mesh_of(2, 2)))


@pytest.mark.parametrize("door", DOORS)
def test_a_unit_of_uneven_parts_is_beside_one_of_even_parts(door: str) -> None:
    """Ranks that hold parts of different sizes of one unit do not take each other for diverged in any."""
    expected = losses_of(plain())
    for losses in run_processes(4, trained, door):
        assert losses == pytest.approx(expected)
