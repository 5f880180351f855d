"""Every command in the guide to the command line runs, in its order, with the exit status 0."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flatparam.command import main
from flatparam_state import open_source, write_checkpoint, write_dcp

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "guides" / "command.md"
ZERO3 = ROOT / "packages/flatparam-files/tests/formats/deepspeed_fixture/stage3-three-ranks"


TRAIN = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert FSDP.__module__.startswith("flatparam")
model = FSDP(torch.nn.Linear(4, 4))
model(torch.ones(1, 4)).sum().backward()
dist.destroy_process_group()
"""
MODELS = """
from torch import nn


class Block(nn.Linear):
    pass


def make():
    return nn.Sequential(nn.Embedding(100, 8), Block(8, 8), Block(8, 8))
"""
CASE = """
import torch
from torch import nn


def build():
    return nn.Linear(4, 2)


def batch(step, micro_batch, data_rank):
    return torch.randn(3, 4)


def loss(model, batch):
    return model(batch).square().mean()
"""


def commands() -> list[list[str]]:
    """The arguments of the commands in the guide."""
    blocks = re.findall(r"```console\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith(("$ flatparam ", "$ source ")) for line in lines)
    return [line.split()[1:] for line in lines]


def prepare() -> None:
    """Make the checkpoints that the guide names."""
    torch.manual_seed(0)
    shapes = {"blocks.0.weight": (6, 5), "blocks.0.bias": (6,), "head.weight": (3, 6)}
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    state = {name: {"step": torch.tensor(4.0), "exp_avg": torch.randn(shape)} for name, shape in shapes.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(shapes)}]}
    torch.save({"model": model, "optimizer": optimizer}, "model.pt")
    torch.save(model, "pytorch_model_fsdp.bin")
    torch.save(optimizer, "optimizer.bin")
    Path("train.py").write_text(TRAIN, encoding="utf-8")
    Path("models.py").write_text(MODELS, encoding="utf-8")
    Path("case.py").write_text(CASE, encoding="utf-8")
    source = open_source("model.pt")
    Path("runs").mkdir()
    write_checkpoint(source, "runs/a", world_size=2, step=4)
    write_dcp(source, "dcp")
    shutil.copytree(ZERO3, "zero3")


def test_commands_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the guide shows works when it is typed, and shows the tree that is printed there."""
    monkeypatch.chdir(tmp_path)
    prepare()
    assert len(commands()) >= 19
    for program, *arguments in commands():
        if arguments[:1] == ["ckpt"]:
            assert main(arguments) == 0, (arguments, capsys.readouterr().err)
        else:
            # A process of its own, as a shell starts it.
            shell = f'flatparam() {{ {sys.executable} -m flatparam "$@"; }}; {" ".join([program, *arguments])}'
            subprocess.run(["bash", "-c", shell], check=True, stdout=subprocess.DEVNULL)
    capsys.readouterr()
    main(["ckpt", "inspect", "runs/a"])
    shown = capsys.readouterr().out.splitlines()
    printed = re.findall(r"```text\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[0].splitlines()
    assert [line for line in printed if line != "..." and line not in shown] == []
