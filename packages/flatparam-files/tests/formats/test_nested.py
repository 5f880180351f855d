"""A model and an optimizer that a program has saved below keys of its own, as DCP's tutorial does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from each_row import each_row
from torch import nn

from flatparam_core import Span
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.source import Source
from flatparam_files.formats.detect import open_source
from flatparam_files.formats.hugging_face import write_hugging_face


def parts(seed: int = 0) -> dict[str, Any]:
    """The state of a model and its optimizer, as `AppState.state_dict` has it."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2).state_dict()
    state = {name: {"exp_avg": torch.rand_like(value)} for name, value in model.items()}
    return {"model": model, "optim": {"state": state, "param_groups": [{"lr": 0.1, "params": list(model)}]}}


def saved(tree: Any, form: str, folder: Path) -> Path:
    if form == "torch":
        torch.save(tree, folder / "file.pt")
        return folder / "file.pt"
    dcp.save(tree, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def names(source: Source) -> set[str]:
    return {path for path in source.tensors if path.startswith("model/")}


MODEL = {"model/weight", "model/bias"}


@pytest.mark.parametrize("form", ["torch", "dcp"])
@pytest.mark.parametrize(
    "tree",
    [
        lambda: parts(),
        lambda: {"app": parts()},
        lambda: {"app": parts(), "step": 3, "more": {"x": torch.ones(2)}},
        lambda: {"outer": {"app": parts()}},
        lambda: {"app": {"model": parts()["model"]}},
    ],
    ids=["at the top", "below a key", "beside others", "below two", "a model alone"],
)
def test_it_is_found(tree: Any, form: str, tmp_path: Path) -> None:
    """If there is one place, it is found; what is beside it at the top is extra."""
    source = open_source(saved(tree(), form, tmp_path))
    assert names(source) == MODEL
    assert ("optimizer" in source.values) == ("optim" in str(tree()))
    if "step" in tree():
        assert source.values["extra"]["step"] == 3
        assert "extra/more/x" in source.tensors
    if "optimizer" in source.values:
        assert "optimizer/state/weight/exp_avg" in source.tensors


@each_row("form", ["torch", "dcp"])
def test_several_places(form: str, tmp_path: Path) -> None:
    """If there are several, they are named, and `prefix` says which one is meant; one that is not there is refused."""
    path = saved({"first": parts(1), "second": {"inner": parts(2)["model"], "app/x": parts(3)}}, form, tmp_path)
    assert names(open_source(path)) == MODEL  # deeper ones are not looked at
    path = saved({"first": parts(1), "second": parts(2)}, form, make(tmp_path / "other"))
    with pytest.raises(
        CheckpointError, match="a model or an optimizer at 'first', 'second'; say which .*--prefix first"
    ):
        open_source(path)
    for prefix, seed in (("first", 1), ("second", 2)):
        source = open_source(path, prefix=prefix)
        (found,) = source.read("model/weight", _whole(source, "model/weight"))
        assert torch.equal(found.view(2, 3), parts(seed)["model"]["weight"])
    assert names(open_source(path, prefix="first/model")) == MODEL
    with pytest.raises(CheckpointError, match="has no 'third' on the way to 'first/third'; found 'model', 'optim'"):
        open_source(path, prefix="first/third")


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _whole(source: Source, path: str) -> Any:
    return Span(0, source.tensors[path].numel)


def test_formats_without_keys_above(tmp_path: Path) -> None:
    """Other formats have nothing above the model, and a prefix is refused there."""
    write_hugging_face(open_source(saved(parts()["model"], "torch", tmp_path)), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="of the format safetensors, in which there is nothing above"):
        open_source(tmp_path / "model.safetensors", prefix="app")
