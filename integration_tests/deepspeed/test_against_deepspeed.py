"""What is read of a checkpoint that DeepSpeed writes now, against what DeepSpeed says is in it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import make_deepspeed_fixture
import pytest
import safetensors.torch
import torch

from flatparam_runtime import Span
from flatparam_state.formats.deepspeed import open_deepspeed

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # DeepSpeed compiles an extension at its first start
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed here; `nox -s deepspeed` has it in an environment of its own.",
    ),
]


@pytest.mark.parametrize("name", make_deepspeed_fixture.CHECKPOINTS)
def test_every_tensor(name: str, tmp_path: Path) -> None:
    """Weights, frozen and tied parameters, buffers and states are bit-equal to those of the living engine."""
    script = make_deepspeed_fixture.__file__
    subprocess.run([sys.executable, "-W", "ignore", script, str(tmp_path), name], check=True)
    source = open_deepspeed(tmp_path / name)
    expected = safetensors.torch.load_file(tmp_path / f"{name}.safetensors")
    assert {path for path in source.tensors if not path.startswith("extra/")} == set(expected)
    for path, tensor in expected.items():
        found = torch.cat(list(source.read(path, Span(0, tensor.numel())))).view(tensor.shape)
        assert found.dtype == tensor.dtype, path
        assert torch.equal(found, tensor), path
