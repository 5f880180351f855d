"""What is read of a checkpoint that DeepSpeed writes now, against what DeepSpeed says is in it."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_deepspeed_fixture
import pytest
import safetensors.torch
import torch
from make_deepspeed_fixture import CHECKPOINTS, Odd, optimizer_of, tokens_of
from torch import Tensor

from flatparam import FullyShardedDataParallel
from flatparam_comm import Collectives, run_threads
from flatparam_comm.testing import PATIENCE
from flatparam_files import open_source, write_checkpoint
from flatparam_runtime import Span
from flatparam_state.checkpoint import Checkpointer

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(4 * PATIENCE),  # DeepSpeed compiles an extension at its first start
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed here; `nox -s run -- deepspeed` has it in an environment of its own.",
    ),
]


def write(directory: Path, name: str, steps: int) -> dict[str, Tensor]:
    """Let DeepSpeed train and save; return what it says is in the checkpoint."""
    script = [sys.executable, "-W", "ignore", make_deepspeed_fixture.__file__]
    subprocess.run([*script, str(directory), name, "--steps", str(steps)], check=True)
    expected: dict[str, Tensor] = safetensors.torch.load_file(directory / f"{name}.safetensors")
    return expected


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_tensor(name: str, tmp_path: Path) -> None:
    """Weights, frozen and tied parameters, buffers and states are bit-equal to those of the living engine."""
    expected = write(tmp_path, name, steps=2)
    source = open_source(tmp_path / name)
    assert source.format == "deepspeed"
    assert {path for path in source.tensors if not path.startswith("extra/")} == set(expected)
    for path, tensor in expected.items():
        found = torch.cat(list(source.read(path, Span(0, tensor.numel())))).view(tensor.shape)
        assert found.dtype == tensor.dtype, path
        assert torch.equal(found, tensor), path


def test_training_goes_on(tmp_path: Path) -> None:
    """After an import, a step of two ranks of ours is bit-equal to the one that DeepSpeed would have taken."""
    write(tmp_path / "before", "stage3-fp32", steps=2)
    expected = write(tmp_path / "after", "stage3-fp32", steps=3)
    write_checkpoint(open_source(tmp_path / "before" / "stage3-fp32"), tmp_path / "run")

    def step(ranks: Collectives) -> dict[str, Any]:
        model = FullyShardedDataParallel(Odd(), use_orig_params=True)
        optimizer = optimizer_of(model)
        assert Checkpointer(tmp_path / "run", model, optimizer).load() is not None
        model(tokens_of(2, ranks.rank)).backward()
        optimizer.step()
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        found = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        for name, of_parameter in states.items():
            found |= {f"optimizer/state/{name}/{kind}": tensor for kind, tensor in of_parameter.items()}
        return found

    for found in run_threads(2, step):
        assert found.keys() == expected.keys()
        for path, tensor in expected.items():
            assert torch.equal(found[path], tensor), path
