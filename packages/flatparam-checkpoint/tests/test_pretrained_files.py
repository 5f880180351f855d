"""Pretrained files of models that are sharded by hooks alone, without the wrapper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flatparam_checkpoint import PretrainedFiles, fit, load_pretrained, read_pretrained
from flatparam_comm import Collectives
from flatparam_comm.testing import run_threads
from flatparam_files import CheckpointError, open_source, write_hugging_face
from flatparam_state import model_state_dict

from .beneath import MLP, Setup, whole


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


def test_a_sharded_model_is_loaded_without_the_wrapper(
    tmp_path: Path, use_orig_params: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load_pretrained` replaces the values of a model that is sharded, and tells how many bytes each rank has read."""
    monkeypatch.setitem(sys.modules, "flatparam", None)
    source = whole(2)[0]
    torch.save(source.state_dict(), tmp_path / "model.bin")
    setup = Setup(world_size=3, use_orig_params=use_orig_params)

    def rank(world: Collectives) -> Any:
        model, _ = setup.build(world, seed=9)
        loaded, report = load_pretrained(model, tmp_path / "model.bin", strict=True, output_loading_info=True)
        assert loaded is model
        return model_state_dict(model), report

    results = run_threads(3, rank)
    assert sum(report.nbytes_read for _, report in results) == results[0][1].nbytes
    for state, _ in results:
        assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())


def test_a_model_that_is_not_sharded_takes_the_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed, every rank says what to install, before a file is opened."""
    monkeypatch.setitem(sys.modules, "flatparam", None)

    def rank(world: Collectives) -> str:
        with pytest.raises(ModuleNotFoundError) as caught:
            load_pretrained(MLP.build(), tmp_path / "nowhere", process_group=world)
        return str(caught.value)

    assert run_threads(2, rank) == 2 * [
        "load_pretrained: expected a model that is sharded, or the package flatparam, which shards it and is not "
        "installed: pip install flatparam"
    ]
