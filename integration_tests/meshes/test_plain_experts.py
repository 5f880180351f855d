"""Checkpoints of experts that are plain tensors, other ones on each rank: stacked if the program says so, or refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatparam
from flatparam.checkpoint import state_dict as functions
from flatparam_comm import Collectives, FlatParamError
from flatparam_comm.testing import run_processes
from flatparam_files.checkpoint.reader import find_checkpoint
from flatparam_meshes import hold_experts
from flatparam_runtime import summon_full_params
from integration_tests.meshes.checkpoints import alone, difference, sharded, step, stepping
from integration_tests.meshes.engines import OURS
from integration_tests.meshes.mixtral import Mixtral

pytestmark = pytest.mark.processes


def trained(
    engine: str, parallel: int, *, dim: int | None = 0, seed: int = 0, holds: bool = True
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on all ranks, of which `parallel` hold other experts, after two steps."""
    from torch.distributed.device_mesh import init_device_mesh

    warnings.filterwarnings("ignore")  # that a unit has fewer ranks is said before hold_experts
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // parallel, parallel), mesh_dim_names=("copies", "experts"))
    torch.manual_seed(seed)
    whole = Mixtral()
    model: Any = Mixtral(mesh.get_group("experts") if parallel > 1 else None)
    model.load_state_dict({n: v for n, v in whole.state_dict().items() if "experts" not in n}, strict=False)
    here = mesh.get_local_rank("experts")
    for name, value in whole.moe.experts.state_dict().items():
        own = model.moe.experts.get_parameter(name)
        with torch.no_grad():
            own.copy_(value.chunk(parallel)[here] + seed)
    model.moe.experts = sharded(model.moe.experts, engine, mesh["copies"])
    model = sharded(model, engine, init_device_mesh("cpu", (size,), mesh_dim_names=("all",)))
    if holds:
        hold_experts(model, dim=dim)
    optimizer = stepping(model)
    step(model, optimizer, 2)
    return model, optimizer


def parts(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return this rank's part of each weight, and of each moment if those are not in a flat parameter."""
    found = {}
    with summon_full_params(model, writeback=False):
        for name, parameter in model.named_parameters():
            found[name.replace("_fsdp_wrapped_module.", "")] = parameter.detach().clone()
    states = functions.get_optimizer_state_dict(
        model, optimizer, options=functions.StateDictOptions(full_state_dict=True)
    )
    for fqn, values in states["state"].items():
        found |= {f"{fqn} {name}": value for name, value in values.items()}
    return found


def wanted(parallel: int, here: int) -> dict[str, Tensor]:
    """Return what a rank has of the model of one process after as many steps."""
    found = alone("mixtral", seed=0, steps=2)
    return {
        name: value.chunk(parallel)[here] if "experts" in name and value.dim() else value
        for name, value in found.items()
    }


def save(ranks: Collectives, engine: str, parallel: int, folder: str) -> str:
    model, optimizer = trained(engine, parallel)
    with flatparam.Checkpointer(folder, model, optimizer) as checkpointer:
        checkpointer.save(2)
    return difference(parts(model, optimizer), wanted(parallel, ranks.rank % parallel), exactly=False)


def load(ranks: Collectives, engine: str, parallel: int, folder: str, again: str) -> str:
    model, optimizer = trained(engine, parallel, seed=1)
    before = parts(model, optimizer)
    right = wanted(parallel, ranks.rank % parallel)
    assert difference(before, right, exactly=False), "it has other values than were saved"
    for _ in range(2):
        flatparam.Checkpointer(folder, model, optimizer).load()
        fault = difference(parts(model, optimizer), right, exactly=False)
        if fault:
            return fault
        step(model, optimizer, 1)
    flatparam.Checkpointer(folder, model, optimizer).load()
    flatparam.Checkpointer(again, model, optimizer).save(3)
    return ""


def test_stacked_experts_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """With `dim=0` a directory has all experts, and they are at their places after 2 -> 4 -> 1 -> 2 ranks of experts."""
    ways = [("originals", 4, 4), ("fully_shard", 1, 1), ("flat", 2, 4)]
    assert run_processes(4, save, "flat", 2, str(tmp_path / "0")) == [""] * 4
    for number, (engine, parallel, size) in enumerate(ways):
        folders = str(tmp_path / str(number)), str(tmp_path / str(number + 1))
        assert run_processes(size, load, engine, parallel, *folders) == [""] * size
    names = [f"model/moe.experts.{name}" for name in ("up", "down")]
    with find_checkpoint(tmp_path / "0") as first, find_checkpoint(tmp_path / "3") as last:
        for name in names:
            assert first.tensors[name].shape[0] == 4
            assert torch.equal(first.load(name), last.load(name))


def passed_on(ranks: Collectives, engine: str, folder: str) -> list[str]:
    """Publish a model, and load what was published into a different one."""
    model, _ = trained(engine, 2)
    found: dict[str, Tensor] = {}
    flatparam.publish(model, found.__setitem__, every_rank=True)
    flatparam.publish(model, Path(folder) / "model.safetensors")
    right = {name: value for name, value in alone("mixtral", seed=0, steps=2).items() if " " not in name}
    other, _ = trained(engine, 4, seed=1)
    flatparam.load_pretrained(other, folder, strict=True)
    again: dict[str, Tensor] = {}
    flatparam.publish(other, again.__setitem__, every_rank=True)
    return [difference(found, right, exactly=False), difference(again, found, exactly=True)]


@pytest.mark.parametrize("engine", OURS)
def test_stacked_experts_are_published_and_loaded(engine: str, tmp_path: Path) -> None:
    """With `dim=0`, `publish` gives all experts, and `load_pretrained` gives each rank its own."""
    assert run_processes(4, passed_on, engine, str(tmp_path)) == [["", ""]] * 4


def refused(ranks: Collectives, engine: str, holds: bool, folder: str) -> list[str]:
    """Return what is said about experts of which nobody has said that they are parts of one tensor."""
    model, optimizer = trained(engine, 2, dim=None, holds=holds)
    stacked, _ = trained(engine, 2)
    told = []
    first = functions.StateDictOptions(full_state_dict=True, cpu_offload=True)
    calls = [
        lambda: flatparam.Checkpointer(folder, model, optimizer).save(1),
        lambda: functions.get_model_state_dict(model),
        lambda: functions.get_optimizer_state_dict(model, optimizer),
        lambda: functions.get_model_state_dict(model, options=first),
        lambda: functions.get_model_state_dict(stacked),
        lambda: flatparam.publish(model, lambda name, tensor: None),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
                # Ranks may hold equal parameters; then a warning is enough.
                told.append("" if holds else " ".join(str(each.message) for each in caught))
            except (FlatParamError, flatparam.CheckpointError) as error:
                told.append(str(error))
    return told


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("engine", OURS)
def test_experts_are_never_lost_in_silence(engine: str, holds: bool, tmp_path: Path) -> None:
    """Without `dim=0`, and in torch's checkpoints also with it, each rank says which parameter, and what to do.

    It is an error; a warning in a state dict if nobody has said that these are experts.
    """
    for told in run_processes(4, refused, engine, holds, str(tmp_path)):
        for each in told:
            assert "'moe.experts.up' is over 2 of the model's 4" in each
            assert "DTensor with Shard(0)" in each


def unlike(ranks: Collectives) -> str:
    other: Any = nn.Sequential(nn.Linear(2, 2 + ranks.rank), nn.Linear(2, 2))
    groups = [dist.new_group([0]), dist.new_group([1])]
    flatparam.fully_shard(other[0], mesh=groups[ranks.rank])
    flatparam.fully_shard(other, mesh=dist.group.WORLD)
    try:
        hold_experts(other, dim=0)
    except FlatParamError as error:
        return str(error)
    return ""


def test_experts_of_other_shapes_are_not_stacked() -> None:
    """If ranks have experts of different shapes, `dim=0` is an error on every rank."""
    for told in run_processes(2, unlike):
        assert "make as many experts on each rank" in told


def test_other_dimensions_are_refused() -> None:
    """Experts are stacked along dimension 0."""
    with pytest.raises(ValueError, match="expected dim=0"):
        hold_experts(nn.Linear(2, 2), dim=1)
