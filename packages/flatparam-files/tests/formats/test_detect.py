"""Paths that are not what a format has there."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flatparam_files import FORMATS, UnknownFormatError, open_source
from flatparam_files.disk.checkpoint_error import CheckpointError


@pytest.mark.pairs
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["file", "directory", "directories", "denied"])
def test_a_path_of_the_wrong_kind(format: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for a directory, the reverse, and what may not be read end in an error that names the path."""
    path = tmp_path / "it"
    if kind == "file":
        path.write_text("hello")
    elif kind == "directories":
        for name in ("model.safetensors", ".metadata", "latest", "data.pkl", "manifest.json"):
            (path / name).mkdir(parents=True)
    elif kind == "directory":
        path.mkdir()
    else:
        torch.save({"w": torch.ones(1)}, path)
        monkeypatch.setattr(os, "open", _denied)
    with pytest.raises(CheckpointError, match="it"):
        open_source(path, format=format)


def _denied(path: object, *rest: object) -> int:
    raise PermissionError(13, "Permission denied", str(path))


def test_paths_that_do_not_go_together(tmp_path: Path) -> None:
    """Two paths of different formats, or of one that has one path, and a format that is none, are refused."""
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    (tmp_path / "model.safetensors").touch()
    both = (tmp_path / "a.pt", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="different formats: safetensors, torch"):
        open_source(*both)
    with pytest.raises(CheckpointError, match="expected one path"):
        open_source(*both, format="safetensors")
    with pytest.raises(
        UnknownFormatError, match="expected the name of a format, found 'keras'; expected one of flatparam"
    ):
        open_source(both[0], format="keras")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_pointer_of_git_lfs(name: str, inside: bool, tmp_path: Path) -> None:
    """A file that Git LFS has not fetched is told from a damaged one, by itself and in its folder."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456789\n"
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=r"pointer of Git LFS.*git lfs pull"):
        open_source(tmp_path if inside else tmp_path / name)


def test_a_folder_of_an_adapter(tmp_path: Path) -> None:
    """PEFT's folder is the file of the adapter in it, unless there is a whole model beside it."""
    save_file({"base.lora_A.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert list(open_source(tmp_path).tensors) == ["model/base.lora_A.weight"]
    save_file({"w": torch.ones(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    assert list(open_source(tmp_path).tensors) == ["model/w"]
    save_file({"v": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(open_source(tmp_path).tensors) == ["model/v"]
