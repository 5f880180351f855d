"""Checkpoints of models under tensor parallelism: on a different number of its ranks, or none, they go on alike."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatparam
from flatparam.checkpoint import state_dict as functions
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from integration_tests.meshes.engines import Setting, made, weights
from integration_tests.meshes.llama import whole
from integration_tests.meshes.training import train_step

pytestmark = pytest.mark.processes


def trained(setting: Setting, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer after so many steps; without steps all weights are zero."""
    logging.disable(logging.WARNING)
    model = made(setting, setting.mesh())
    optimizer = setting.stepping()(model.parameters())
    if not steps:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    for step in range(steps):
        train_step(setting, model, optimizer, step, dist.get_rank() // setting.shape[-1])
    return model, optimizer


def held(setting: Setting, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all that there is, whole: weights, and the moments of AdamW."""
    found = weights(setting, model)
    _, states = functions.get_state_dict(model, optimizer)
    for fqn, values in states["state"].items():
        found |= {f"{fqn} {name}": whole(value).clone() for name, value in values.items()}
    return found


def save(ranks: Collectives, setting: Setting, folder: str) -> dict[str, Tensor]:
    model, optimizer = trained(setting, 2)
    with flatparam.Checkpointer(folder, model, optimizer) as checkpointer:
        checkpointer.save(2)
    return held(setting, model, optimizer)


def load(ranks: Collectives, setting: Setting, folder: str, again: str) -> dict[str, Tensor]:
    model, optimizer = trained(setting, 0)
    flatparam.Checkpointer(folder, model, optimizer).load()
    flatparam.Checkpointer(again, model, optimizer).save(3)
    return held(setting, model, optimizer)


def assert_alike(found: list[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    for each in found:
        assert each.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(each[name].reshape(value.shape), value), name


def test_a_directory_at_other_sizes(tmp_path: Path) -> None:
    """Weights and moments have the same bits after 2 -> 1 -> 4 -> 2 ranks of tensor parallelism, by every door."""
    ways = [Setting("originals", (2, 1)), Setting("flat", (1, 4)), Setting("fully_shard", (2, 2))]
    wanted, *others = run_processes(4, save, Setting("flat", (2, 2)), str(tmp_path / "0"))
    assert_alike(others, wanted)
    for number, setting in enumerate(ways):
        folders = str(tmp_path / str(number)), str(tmp_path / str(number + 1))
        assert_alike(run_processes(setting.ranks, load, setting, *folders), wanted)


def save_by_torch(ranks: Collectives, setting: Setting, folder: str) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained(setting, 2)
    state, moments = functions.get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)
    return held(setting, model, optimizer)


def load_by_torch(ranks: Collectives, setting: Setting, folder: str) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained(setting, 0)
    state, moments = functions.get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": moments}, checkpoint_id=folder)
    functions.set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    return held(setting, model, optimizer)


@pytest.mark.parametrize("engine", [pytest.param("originals", marks=pytest.mark.long), "fully_shard"])
def test_torchs_checkpoints_at_other_sizes(engine: str, tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` has weights and moments, which load on other numbers of ranks, too."""
    wanted, *others = run_processes(4, save_by_torch, Setting(engine, (2, 2)), str(tmp_path))
    assert_alike(others, wanted)
    assert_alike(run_processes(2, load_by_torch, Setting(engine, (2, 1)), str(tmp_path)), wanted)
