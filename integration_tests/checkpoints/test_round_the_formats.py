"""A checkpoint of a training run goes through every format and back, and training goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import Checkpointer
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.command import main
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads


def make(**arguments: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **arguments)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: FSDP, optimizer: torch.optim.Optimizer, number: int, ranks: Collectives) -> torch.Tensor:
    batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(number))
    loss = model(batch.chunk(ranks.size)[ranks.rank]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(ranks: Collectives, directory: Path) -> list[torch.Tensor]:
    """Two steps, a checkpoint, and two steps more."""
    model, optimizer = make()
    for number in range(2):
        step(model, optimizer, number, ranks)
    with Checkpointer(directory, model, optimizer) as checkpointer:
        checkpointer.save(2, extra={"epoch": 1, "order": torch.arange(5)})
    return [step(model, optimizer, number, ranks) for number in (2, 3)]


def go_on(ranks: Collectives, directory: Path) -> list[torch.Tensor]:
    """The last two steps, from a checkpoint."""
    model, optimizer = make(use_orig_params=True)
    with Checkpointer(directory, model, optimizer) as checkpointer:
        assert checkpointer.load() is not None
    return [step(model, optimizer, number, ranks) for number in (2, 3)]


@pytest.mark.parametrize("form", ["torch", "dcp", "flatparam"])
def test_there_and_back(form: str, tmp_path: Path) -> None:
    """Exported, it is equal; imported again, equal; and training goes on bit for bit."""
    losses = run_threads(2, train, tmp_path / "run")
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    run = str(tmp_path / "run")
    if form == "flatparam":
        assert main(["ckpt", "reshard", run, there, "--world-size", "5"]) == 0
    else:
        assert main(["ckpt", "export", run, there, "--to", form]) == 0
    assert main(["ckpt", "diff", run, there]) == 0
    assert main(["ckpt", "import", there, back, "--step", "2"]) == 0
    assert main(["ckpt", "verify", back]) == 0
    assert main(["ckpt", "diff", run, back]) == 0
    again = run_threads(2, go_on, Path(back))
    for one, other in zip(losses, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_weights_for_others(tmp_path: Path) -> None:
    """Exported to Hugging Face's format, the weights are those that the plain module loads."""
    import safetensors.torch

    run_threads(2, train, tmp_path / "run")
    assert main(["ckpt", "export", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert main(["ckpt", "diff", str(tmp_path / "run"), str(tmp_path / "hf"), "--only", "model"]) == 0
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    module.load_state_dict(safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors"))
