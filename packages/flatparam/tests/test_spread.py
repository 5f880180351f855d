"""Torch's own functions ask all ranks about a wrapper's gradients, in a process that has called nothing else of ours."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flatparam_comm.testing import PATIENCE

PROGRAM = """
import sys
import torch
from torch import nn
from flatparam import FullyShardedDataParallel as FSDP
from flatparam_comm import run_threads

USES_ORIGINALS = sys.argv[1] == "True"

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

def train(model, inputs, clip, scaled):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    norms = []
    for x in inputs:
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms, scaler.get_scale() if scaled else None

def rank(ranks, clip, scaled, inputs):
    model = FSDP(make(), use_orig_params=USES_ORIGINALS)
    found = train(model, inputs, clip, scaled)
    return (*found, {name: value.clone() for name, value in model.state_dict().items()})

inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(step)) for step in range(3)]
overflowing = [inputs[0], torch.full((4, 5), 1e30), inputs[2]]
for clip, scaled, given in ((True, False, inputs), (False, True, overflowing), (True, True, inputs)):
    local = make()
    norms, scale = train(local, given, clip, scaled)
    for found_norms, found_scale, state in run_threads(2, rank, clip, scaled, given):
        torch.testing.assert_close(found_norms, norms)
        assert found_scale == scale, (found_scale, scale)
        torch.testing.assert_close(state, dict(local.state_dict()))
    assert scaled is False or scale == (2.0 if given is overflowing else 4.0)
"""


@pytest.mark.processes
@pytest.mark.parametrize("use_orig_params", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_wrapper_and_functions_of_torch(use_orig_params: bool) -> None:
    """`clip_grad_norm_` and `GradScaler` of torch train a wrapper as they train one process, on every rank."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(use_orig_params)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
