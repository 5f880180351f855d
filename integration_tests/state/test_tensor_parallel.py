"""Sharded state of a model that is also tensor parallel: beside torch's FSDP1, which lays it over both dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatparam
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.processes


class Net(nn.Module):
    """Cut by columns, by rows, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


def trained(library: Any, mesh: Any) -> tuple[Any, torch.optim.Optimizer]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = library.FullyShardedDataParallel(
        parallelize_module(Net(), mesh["tensor"], plan),
        device_mesh=mesh["data"],
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    # The sum of what a norm returns has no gradient but the errors of rounding.
    output = model(torch.randn(2, 4) * (1 + mesh["data"].get_local_rank()))
    (output * torch.arange(1.0, 5.0)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(library: Any, kind: str, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of both in the form `kind`, flattened."""
    wrapper = library.FullyShardedDataParallel
    with wrapper.state_dict_type(model, library.StateDictType[kind]):
        states = wrapper.optim_state_dict(model, optimizer)["state"]
        named = {f"{fqn} {name}": value for fqn, values in states.items() for name, value in values.items()}
        return {**model.state_dict(), **named}


def compare(ranks: Collectives, directory: str, kind: str) -> None:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, optimizer = trained(flatparam, mesh)
    ours = state_of(flatparam, kind, model, optimizer)
    theirs = state_of(fsdp, kind, *trained(fsdp, mesh))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if isinstance(value, DTensor):
            assert ours[name].placements == value.placements, name
            assert ours[name].device_mesh == value.device_mesh
            assert ours[name].shape == value.shape
            # On the CPU FSDP1's full states of an optimizer share memory: one is the other.
            if kind == "SHARDED_STATE_DICT" or " exp_avg" not in name:
                # Products of what is cut by columns have other last bits than FSDP1's on some processors.
                torch.testing.assert_close(ours[name].to_local(), value.to_local(), msg=name)
    for name, value in state_of(flatparam, "SHARDED_STATE_DICT", model, optimizer).items():
        if isinstance(value, DTensor):
            whole = ours[name].full_tensor() if isinstance(ours[name], DTensor) else ours[name]
            assert torch.equal(whole, value.full_tensor()), name

    wrapper = flatparam.FullyShardedDataParallel
    with wrapper.state_dict_type(model, flatparam.StateDictType[kind]):
        state, moments = model.state_dict(), wrapper.optim_state_dict(model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(state)
        optimizer.load_state_dict(wrapper.optim_state_dict_to_load(model, optimizer, moments))
    again = state_of(flatparam, kind, model, optimizer)
    for name, value in ours.items():
        found, wanted = (each.to_local() if isinstance(each, DTensor) else each for each in (again[name], value))
        assert torch.equal(found, wanted), name

    with flatparam.Checkpointer(directory, model, optimizer) as checkpointer:
        checkpointer.save(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpointer.load()
    loaded = state_of(flatparam, kind, model, optimizer)
    for name, value in ours.items():
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in (loaded[name], value)]
        assert torch.equal(*parts), name


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_beside_fsdp1(tmp_path: Path, kind: str) -> None:
    """S-085, S-105: the same tensors, meshes, placements and parts; they load back, also from a directory."""
    run_processes(4, compare, str(tmp_path), kind)
