"""What torch's own FSDP1 and FSDP2 save and load on two ranks, through our readers and writers."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.api import FullOptimStateDictConfig

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from flatparam_core import Span
from flatparam_state import Source, open_source, write_checkpoint, write_dcp

pytestmark = pytest.mark.processes

WORLD_SIZE = 2


def build() -> nn.Module:
    """Layers whose sizes two ranks cannot share equally."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.BatchNorm1d(3))


def shard(model: nn.Module, kind: str) -> nn.Module:
    """The model, sharded by FSDP1 (with or without the original parameters) or by FSDP2."""
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        fully_shard(model[0], mesh=mesh)  # type: ignore[index]
        fully_shard(model, mesh=mesh)
        return model
    return FullyShardedDataParallel(model, use_orig_params=kind == "fsdp1-originals", device_id=torch.device("cpu"))


def trained(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded model after some steps; each rank has a batch of its own, and the weights do not depend on kind."""
    model = shard(build(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Full state by name, by torch's own means; on every rank, with memory of its own."""
    if isinstance(model, FullyShardedDataParallel):
        configs = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            return copy.deepcopy((model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)))
    return copy.deepcopy(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))


def save(group: Collectives, kind: str, path: str, flatten: bool) -> tuple[Any, Any]:
    """Train and save with torch's DCP; returns the full state."""
    warnings.simplefilter("ignore")
    model, optimizer = trained(kind, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, states = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    return full_state(model, optimizer)


def save_full(group: Collectives, kind: str, path: str) -> tuple[Any, Any]:
    """Train and save the full state as one file of rank 0."""
    warnings.simplefilter("ignore")
    weights, states = full_state(*trained(kind, 3))
    if group.rank == 0:
        torch.save({"model": weights, "optimizer": states}, path)
    return weights, states


def load(group: Collectives, kind: str, path: str) -> tuple[Any, Any]:
    """Load with torch's DCP into a fresh model that was trained otherwise; returns the full state."""
    warnings.simplefilter("ignore")
    model, optimizer = trained(kind, 1)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return full_state(model, optimizer)


def whole(source: Source, path: str) -> torch.Tensor:
    """The tensor `path` of a source."""
    info = source.tensors[path]
    return torch.cat(list(source.read(path, Span(0, info.numel)))).view(info.shape)


def assert_holds(source: Source, weights: Any, states: Any) -> None:
    """The source has these weights and states, bit for bit, and the groups' options."""
    assert {path for path in source.tensors if path.startswith("model/")} == {f"model/{name}" for name in weights}
    for name, tensor in weights.items():
        assert torch.equal(whole(source, f"model/{name}"), tensor), name
    for name, values in states["state"].items():
        for key, tensor in values.items():
            assert torch.equal(whole(source, f"optimizer/state/{name}/{key}"), tensor), (name, key)
    found, expected = source.values["optimizer"]["param_groups"], states["param_groups"]
    assert [set(group["params"]) for group in found] == [set(group["params"]) for group in expected]
    assert [group["lr"] for group in found] == [group["lr"] for group in expected]


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-originals", "fsdp2"])
def test_sharded_state_is_read(kind: str, flatten: bool, tmp_path: Path) -> None:
    """What two ranks of torch's FSDP saved with DCP has the weights and states that they had."""
    if flatten and kind == "fsdp1":
        pytest.skip("torch itself refuses it without the original parameters")
    weights, states = run_processes(WORLD_SIZE, save, kind, str(tmp_path / "dcp"), flatten)[0]
    source = open_source(tmp_path / "dcp")
    assert_holds(source, weights, states)
    write_checkpoint(source, tmp_path / "run", world_size=3)
    assert_holds(open_source(tmp_path / "run"), weights, states)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-originals", "fsdp2"])
def test_full_state_is_read(kind: str, tmp_path: Path) -> None:
    """So has the full state in a file of torch.save."""
    weights, states = run_processes(WORLD_SIZE, save_full, kind, str(tmp_path / "a.pt"))[0]
    assert_holds(open_source(tmp_path / "a.pt"), weights, states)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-originals", "fsdp2"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_torch_goes_on_from_what_we_write(world_size: int, kind: str, tmp_path: Path) -> None:
    """Two ranks of torch's FSDP load a directory that we wrote, of any number of files, and have the same state."""
    weights, states = run_processes(WORLD_SIZE, save_full, "fsdp1-originals", str(tmp_path / "a.pt"))[0]
    write_checkpoint(open_source(tmp_path / "a.pt"), tmp_path / "run")
    write_dcp(open_source(tmp_path / "run"), tmp_path / "dcp", world_size=world_size)
    for found_weights, found_states in run_processes(WORLD_SIZE, load, kind, str(tmp_path / "dcp")):
        assert found_weights.keys() == weights.keys()
        assert all(torch.equal(found_weights[name], tensor) for name, tensor in weights.items())
        for name, values in states["state"].items():
            for key, tensor in values.items():
                assert torch.equal(found_states["state"][name][key], tensor), (name, key)
