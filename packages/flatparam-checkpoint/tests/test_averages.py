"""Averages of a model are saved and loaded with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from each_row import each_row

from flatparam_checkpoint import Checkpointer
from flatparam_comm import Collectives
from flatparam_comm.testing import run_threads
from flatparam_state import ShardedEMA, model_state_dict

from .beneath import DECAY, Setup, change, whole


@each_row("shards", [1, 2, 4])
def test_averages(shards: int, tmp_path: Path, use_orig_params: bool) -> None:
    """On four ranks, with any number of them to a shard, averages are torch's, and a state of them loads at two."""
    setup = Setup(world_size=4, shards=shards, use_orig_params=use_orig_params)

    def save(world: Collectives) -> Any:
        model, _ = setup.build(world)
        ema = ShardedEMA(model, DECAY)
        for step in range(3):
            change(model, step)
            ema.update()
        with ema.applied(model):
            found = model_state_dict(model)
        Checkpointer(tmp_path, model, averages=ema, ranks=world).save(3)
        return found

    def load(world: Collectives) -> Any:
        model, _ = Setup(world_size=2).build(world, seed=9)
        ema = ShardedEMA(model, DECAY)
        Checkpointer(tmp_path, model, averages=ema, ranks=world).load()
        assert ema.updates == 3
        with ema.applied(model):
            return model_state_dict(model)

    expected = whole(3)[1].state_dict()
    for state in [*run_threads(4, save), *run_threads(2, load)]:
        assert set(state) == set(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
