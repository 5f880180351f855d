"""What `TORCH_DISTRIBUTED_DEBUG=INFO` has a wrapper tell."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam_comm import Collectives

from .worlds import on_ranks


@pytest.fixture
def info() -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)
    yield
    dist.set_debug_level(before)


def step(world: Collectives) -> None:
    model = FSDP(nn.Linear(2, 2), use_orig_params=True)
    model.module.weight.data = torch.zeros(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    model.load_state_dict(model.state_dict())


@pytest.mark.usefixtures("info")
def test_info_tells_of_what_is_taken_over_and_reduced(caplog: pytest.LogCaptureFixture) -> None:
    """S-043, S-124, S-089: a warning names the parameter, the log has each reduction and where loading spent its time."""
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        on_ranks(2, step)
    assert any("weight had been given other data" in str(warning.message) for warning in told)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("reduce" in line for line in lines) == sum("finish" in line for line in lines) == 2
    assert sum("load_state_dict() profiling" in line for line in lines) == 1  # on rank 0


def test_without_it_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """By default neither is."""
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        on_ranks(2, step)
    assert not told
    assert not caplog.records
