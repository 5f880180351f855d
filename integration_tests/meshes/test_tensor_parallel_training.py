"""Training under tensor parallelism beside one process that has all data."""

from __future__ import annotations

from typing import Any

import pytest

from integration_tests.meshes.engines import OURS, Setting
from integration_tests.meshes.training import run

pytestmark = pytest.mark.processes

SHAPES = [(2, 2), (1, 2), (2, 1), (2, 1, 2), (1, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("engine", OURS)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_it_trains_as_one_process_does(engine: str, shape: tuple[int, ...], optimizer: str) -> None:
    """On every mesh, loss, each gradient, the norm and the weights of three steps are those of one process."""
    assert run(Setting(engine, shape, optimizer=optimizer)) == []


@pytest.mark.parametrize("engine", OURS)
@pytest.mark.parametrize(
    "how",
    [
        {"micro_batches": 2},
        {"micro_batches": 2, "synchronises": False},
        {"narrow": True},
        {"narrow": True, "micro_batches": 3, "synchronises": False},
        {"sequence": False, "loss_parallel": False},
        {"loss_parallel": False},
    ],
    ids=str,
)
def test_settings(engine: str, how: dict[str, Any]) -> None:
    """Accumulation with and without `no_sync`, bf16 with sums in fp32, and plans without sequence parallelism."""
    assert run(Setting(engine, (2, 2), **how)) == []


@pytest.mark.long
@pytest.mark.parametrize("engine", OURS)
def test_three_dimensions(engine: str) -> None:
    """Copies, shards and tensor parallelism on eight ranks."""
    assert run(Setting(engine, (2, 2, 2))) == []
