"""From our checkpoint to another format and back: nothing changes."""

import functools
import operator
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatparam_files import (
    open_source,
    select,
    verify_source,
    write_checkpoint,
    write_dcp,
    write_hugging_face,
    write_torch_file,
)
from flatparam_files.checkpoint.reader import open_checkpoint
from flatparam_files.checkpoint.values import reference
from flatparam_files.checkpoint.writer import CheckpointWriter
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.source import Source, TensorInfo, join_path
from flatparam_files.formats.torch_files import open_torch_file
from flatparam_files.formats.whole_sources import stored_source

from .samples import DTYPES, assert_same_source, awkward, contents, same, state, whole

NAMES = st.text("ab.0_/%é", min_size=1, max_size=6)
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=5)
STATES = st.dictionaries(st.sampled_from(["exp_avg", "step", "flag"]), TENSORS | PLAIN, max_size=3)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Checkpoints of any names, shapes, dtypes and values."""
    model = draw(st.dictionaries(NAMES, TENSORS, min_size=1, max_size=4))
    names = list(model)
    betas = (0.9, draw(st.floats(0, 1) | TENSORS))
    groups = [{"lr": draw(PLAIN | TENSORS), "betas": betas, "params": names}]
    optimizer = {"state": {name: draw(STATES) for name in names}, "param_groups": groups}
    extra = draw(st.dictionaries(NAMES, TENSORS | PLAIN | st.lists(PLAIN, max_size=2), max_size=3))
    return {"model": model, "optimizer": optimizer, "extra": extra}


def ours(directory: Path, tree: dict[str, Any], world_size: int) -> Source:
    """Our checkpoint of a tree."""
    torch.save(tree, directory / "start.pt")
    write_checkpoint(open_torch_file(directory / "start.pt"), directory / "start", world_size=world_size, step=7)
    return open_source(directory / "start")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees(), st.integers(1, 4))
def test_there_and_back(tree: dict[str, Any], world_size: int) -> None:
    """Ours to a file of torch or a directory of DCP, and back to ours, is what it was; so is the model by safetensors."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        start = ours(directory, tree, world_size)
        assert_same_source(start, open_torch_file(directory / "start.pt"))
        write_torch_file(start, directory / "a.pt")
        keys = [".".join(("model", key)) for key in tree["model"]]
        write_checkpoint(open_source(directory / "a.pt"), directory / "a", world_size=2)
        assert_same_source(open_source(directory / "a"), start)
        if len(set(keys)) == len(keys):
            try:
                write_dcp(start, directory / "dcp", world_size=world_size)
            except CheckpointError as error:
                assert "the same key" in str(error)  # DCP joins names with dots
            else:
                write_checkpoint(open_source(directory / "dcp"), directory / "b")
                assert_same_source(open_source(directory / "b"), start)
        model = select(start, ["model"])
        write_hugging_face(model, directory / "hf", max_shard_nbytes=40)
        write_checkpoint(open_source(directory / "hf"), directory / "c")
        assert_same_source(open_source(directory / "c"), model)


@pytest.mark.parametrize("names", [[], ["first", "b/%"]], ids=["one", "several"])
def test_settings_that_are_tensors_stay_where_they_were(names: list[str], tmp_path: Path) -> None:
    """An optimizer's tensor is found in its group again, and its parameters' states are not, however it was stored."""

    def optimizer(lr: float) -> dict[str, Any]:
        group = {"lr": torch.tensor(lr), "betas": (0.9, torch.tensor([0.5])), "params": ["w"]}
        return {"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": [group]}

    optimizers = {name: optimizer(number) for number, name in enumerate(names)}
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": optimizers or optimizer(2.0)}, tmp_path / "a.pt")
    write_checkpoint(open_source(tmp_path / "a.pt"), tmp_path / "a")
    write_checkpoint(open_source(tmp_path / "a"), tmp_path / "resharded", world_size=2)
    write_torch_file(open_source(tmp_path / "resharded"), tmp_path / "b.pt")
    write_checkpoint(open_source(tmp_path / "b.pt"), tmp_path / "b")
    write_dcp(open_source(tmp_path / "resharded"), tmp_path / "dcp")
    write_checkpoint(open_source(tmp_path / "dcp"), tmp_path / "c")
    for each in ("a", "resharded", "b", "c"):
        found = open_checkpoint(tmp_path / each).manifest.values["optimizer"]
        for keys in [["optimizer", name] for name in names] or [["optimizer"]]:
            values = functools.reduce(operator.getitem, keys[1:], found)
            path = join_path([*keys, "param_groups", "0"])
            (group,) = values["param_groups"]
            assert group["lr"] == reference(f"{path}/lr"), each
            assert group["betas"] == [0.9, reference(f"{path}/betas/1")], each
            assert not values.get("state", {}).get("w"), each


def test_extra_is_a_single_tensor(tmp_path: Path) -> None:
    """What a program keeps beside its model may be one tensor, and stays that."""
    tree = {"model": {"w": torch.ones(3)}, "extra": torch.arange(4)}
    torch.save(tree, tmp_path / "a.pt")
    write_checkpoint(open_source(tmp_path / "a.pt"), tmp_path / "a")
    write_checkpoint(open_source(tmp_path / "a"), tmp_path / "b", world_size=2)
    assert same(whole(open_source(tmp_path / "b"), "extra"), tree["extra"])
    assert open_checkpoint(tmp_path / "b").manifest.values["extra"] == reference("extra")


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """Tied weights have all their names in every format, and lie once in ours, in torch's and in safetensors."""
    torch.save(awkward(), tmp_path / "a.pt")
    write_checkpoint(open_torch_file(tmp_path / "a.pt"), tmp_path / "run")
    assert open_checkpoint(tmp_path / "run").manifest.aliases == {"model/tied.b": "model/tied.a"}
    write_torch_file(open_source(tmp_path / "run"), tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert found["tied.a"].data_ptr() == found["tied.b"].data_ptr()
    write_dcp(open_source(tmp_path / "run"), tmp_path / "dcp")
    assert same(whole(open_source(tmp_path / "dcp"), "model/tied.b"), awkward()["tied.b"])
    assert list(open_source(tmp_path / "dcp").tensors) == list(open_source(tmp_path / "run").tensors)


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    """What is awkward to store comes to our directory and back bit-equal."""
    torch.save(awkward(), tmp_path / "a.pt")
    source = open_torch_file(tmp_path / "a.pt")
    write_checkpoint(source, tmp_path / "run", world_size=3)
    assert_same_source(open_source(tmp_path / "run"), source)
    assert verify_source(open_source(tmp_path / "run")).problems == ()


def test_a_tensor_in_another_memory_order(tmp_path: Path) -> None:
    """A parameter that we store in channels-last order is read in row-major order, in ranges and as a whole."""
    from flatparam_files.checkpoint.manifest import TensorRecord

    tensor = torch.randn(2, 3, 4, 5)
    stored = tensor.permute(0, 2, 3, 1).contiguous()
    with CheckpointWriter(tmp_path / "run", {"model/w": TensorInfo((120,), torch.float32)}, {}) as writer:
        writer.write("model/w", [stored.flatten()])
        writer.commit()
    reader = open_checkpoint(tmp_path / "run")
    flat = reader.manifest.tensors["model/w"]
    record = TensorRecord(TensorInfo(tensor.shape, tensor.dtype), flat.pieces, (60, 1, 15, 3))
    reader.manifest.tensors["model/w"] = record  # type: ignore[index]
    assert same(whole(stored_source(reader), "model/w"), tensor)


def test_states_of_the_optimizer_alone(tmp_path: Path) -> None:
    """A part of a source has the tensors and the values of that part, and no others."""
    source = ours(tmp_path, state(), 2)
    part = select(source, ["optimizer"])
    assert set(part.values) == {"optimizer"}
    assert all(path.startswith("optimizer/") for path in part.tensors)
    assert len(contents(part)) == 9


@each_row("world_size", [1, 5])
def test_a_dry_run_says_what_is_written(world_size: int, tmp_path: Path) -> None:
    """Each writer names the same files and bytes with `dry_run` as without, and writes nothing with it."""
    source = ours(tmp_path, state(), 2)
    for name, write, arguments in (
        ("a.pt", write_torch_file, {}),
        ("dcp", write_dcp, {"world_size": world_size}),
        ("hf", write_hugging_face, {"max_shard_nbytes": 100}),
        ("run", write_checkpoint, {"world_size": world_size}),
    ):
        planned = write(source, tmp_path / name, dry_run=True, **arguments)  # type: ignore[operator]
        assert not (tmp_path / name).exists()
        assert write(source, tmp_path / name, **arguments) == planned  # type: ignore[operator]
        written = [path for path in planned if (tmp_path / name / path).is_file() or name == path]
        assert written == list(planned)
        with pytest.raises(CheckpointError):
            write(source, tmp_path / name, dry_run=True, **arguments)  # type: ignore[operator]
