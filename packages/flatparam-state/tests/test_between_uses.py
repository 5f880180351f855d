"""Averages and offloading of models that are sharded by hooks alone, without the layer above."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flatparam_comm import Collectives, FlatParamError, SingleCollectives
from flatparam_comm.testing import run_threads
from flatparam_state import ShardedEMA, model_state_dict, offload, onload

from .setups import DECAY, Setup, change, whole


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_averages(shards: int, use_orig_params: bool) -> None:
    """On four ranks, with any number of them to a shard, averages are torch's."""
    setup = Setup(world_size=4, shards=shards, use_orig_params=use_orig_params)

    def rank(world: Collectives) -> Any:
        model, _ = setup.build(world)
        ema = ShardedEMA(model, DECAY)
        for step in range(3):
            change(model, step)
            ema.update()
        with ema.applied(model):
            return model_state_dict(model)

    expected = whole(3)[1].state_dict()
    for state in run_threads(4, rank):
        assert set(state) == set(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_averages_of_data_that_was_given(use_orig_params: bool) -> None:
    """An update sees the data that somebody has given a parameter since, as it sees values that have changed in place."""
    setup = Setup(use_orig_params=use_orig_params)

    def rank(world: Collectives, gives: bool) -> Any:
        model, _ = setup.build(world)
        ema = ShardedEMA(model, DECAY)
        ema.update()
        for parameter in model.parameters():
            if gives:
                parameter.data = parameter.data * 2
            else:
                parameter.data.mul_(2)
        ema.update()
        with ema.applied(model):
            return model_state_dict(model)

    for found, twin in zip(run_threads(2, rank, True), run_threads(2, rank, False), strict=True):
        assert all(torch.equal(found[name], value) for name, value in twin.items())


def test_averages_that_do_not_fit(use_orig_params: bool) -> None:
    """If averages cannot be loaded, the number of updates stays what it was, as they do."""
    model, _ = Setup(use_orig_params=use_orig_params).build(SingleCollectives())
    ema = ShardedEMA(model, DECAY)
    ema.update()
    with pytest.raises(RuntimeError, match="Missing key"):
        ema.load_state_dict({"averages": {}, "updates": 5})
    assert ema.updates == 1


@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
def test_offloading(on_disk: bool, tmp_path: Path, use_orig_params: bool) -> None:
    """A unit is not gathered while it is away, and training goes on to the bits of one that never left."""
    setup = Setup(use_orig_params=use_orig_params)

    def rank(world: Collectives, leaves: bool) -> Any:
        model, optimizer = setup.build(world)
        for step in range(3):
            setup.train(model, optimizer, [step])
            if leaves:
                # A name that no checkpoint can have is one here.
                given = {"state": optimizer} if on_disk else optimizer
                freed = offload(model, folder=tmp_path if on_disk else None, optimizer=given)
                assert (freed > 0) == on_disk
                with pytest.raises(FlatParamError, match=r"offloaded to .*call flatparam\.onload"):
                    model_state_dict(model)
                assert onload(model, optimizer=given) == freed
        return model_state_dict(model)

    for found, twin in zip(run_threads(2, rank, True), run_threads(2, rank, False), strict=True):
        assert all(torch.equal(found[name], value) for name, value in twin.items())
