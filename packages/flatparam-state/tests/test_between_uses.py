"""Averages, offloading and pretrained files of models that are sharded by hooks alone, without the layer above."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flatparam_comm import Collectives, FlatParamError
from flatparam_comm.testing import run_threads
from flatparam_files.formats import open_source
from flatparam_state import (
    Checkpointer,
    CheckpointError,
    PretrainedFiles,
    ShardedEMA,
    fit,
    model_state_dict,
    offload,
    onload,
    read_pretrained,
    write_hugging_face,
)

from .checkpoint.runs import MLP, Setup

DECAY = 0.9


def whole(steps: int) -> tuple[nn.Module, nn.Module]:
    """A model in one process, and its average after so many updates."""
    model = MLP.build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(steps):
        change(model, step)
        average.update_parameters(model)
    return model, average.module


def change(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01).add_(0.01 * step)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_averages(shards: int, tmp_path: Path, use_orig_params: bool) -> None:
    """On four ranks, with any number of them to a shard, averages are torch's, and a checkpoint of them is, too."""
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


def test_pretrained_files(tmp_path: Path, use_orig_params: bool) -> None:
    """Three ranks read files into the shards that they have, each byte once; what does not fit is named before."""
    source = whole(2)[0]
    torch.save(source.state_dict(), tmp_path / "model.bin")
    write_hugging_face(open_source(tmp_path / "model.bin"), tmp_path / "files", max_shard_nbytes=100)
    setup = Setup(world_size=3, use_orig_params=use_orig_params)

    def rank(world: Collectives) -> Any:
        model, _ = setup.build(world, seed=9)
        files = PretrainedFiles.open(tmp_path / "files")
        found = fit(model, files)
        assert (found.missing, found.unexpected, found.mismatched) == ((), (), ())
        seen: list[int] = []
        nbytes = read_pretrained(model, files, setup.topology(world), observe=seen.append)
        assert sum(seen) == nbytes
        return model_state_dict(model), nbytes, files.nbytes

    results = run_threads(3, rank)
    assert sum(nbytes for _, nbytes, _ in results) == results[0][2]
    for state, _, _ in results:
        assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())


def test_names_of_pretrained_files(tmp_path: Path) -> None:
    """Two tensors that a function gives one name are refused, and so are files without a model."""
    torch.save(whole(0)[0].state_dict(), tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="both become 'same'"):
        PretrainedFiles.open(tmp_path / "model.bin", lambda name: "same")
    torch.save({"extra": {"a": torch.ones(1)}}, tmp_path / "other.bin")
    with pytest.raises(CheckpointError, match="has no tensors of a model"):
        PretrainedFiles.open(tmp_path / "other.bin")
