"""Directories of torch.distributed.checkpoint, both ways."""

import io
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from each_row import each_row
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from flatparam_core import Span
from flatparam_files import open_source, verify_source, write_dcp
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.formats.dcp_reader import open_dcp
from flatparam_files.formats.torch_files import open_torch_file

from .samples import assert_same_source, awkward, flip, same, state, whole


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it runs without ranks
        yield


def saved(path: Path, tree: dict[str, Any]) -> Path:
    """The directory, written by torch."""
    dcp.save(tree, checkpoint_id=path, no_dist=True)
    return path


def as_source(path: Path, tree: dict[str, Any]) -> Any:
    """The same tree by way of a file of torch.save."""
    torch.save(tree, path)
    return open_torch_file(path)


def test_what_torch_saved(tmp_path: Path) -> None:
    """Model, optimizer and what a program keeps are those of the file of torch.save with the same tree."""
    found = open_dcp(saved(tmp_path / "d", state()))
    assert_same_source(found, as_source(tmp_path / "a.pt", state()))


@each_row("order", [("model", "model.weight"), ("model.weight", "model")])
def test_a_path_inside_a_leaf(tmp_path: Path, order: tuple[str, ...]) -> None:
    """Of two entries, one of which is at the place of the other's dictionary, none is dropped: they are refused."""
    values = {"model": "llama", "model.weight": torch.ones(2)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({key: values[key] for key in order}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    with pytest.raises(CheckpointError, match="contradict each other at"):
        open_dcp(tmp_path)


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    """All dtypes and shapes come back bit-equal."""
    tree = {name: tensor for name, tensor in awkward().items() if name not in ("negative", "conjugate")}
    source = open_dcp(saved(tmp_path / "d", {"model": tree}))
    assert len(source.tensors) == len(tree)
    for name, tensor in tree.items():
        assert same(whole(source, f"model/{name.replace('%', '%25').replace('/', '%2F')}"), tensor), name


@each_row("as_tensor", [False, True])
@each_row("flatten", [False, True])
def test_state_of_an_optimizer(flatten: bool, as_tensor: bool, tmp_path: Path) -> None:
    """What `get_state_dict` gives is found by parameter, also in its flattened form, where each has its own settings."""
    rate: Any = torch.tensor if as_tensor else float
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": rate(0.1)}, {"params": model[1].parameters(), "lr": rate(0.2)}]
    )
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, states = get_state_dict(model, optimizer, options=options)
    source = open_dcp(saved(tmp_path / "d", {"model": weights, "optim": states}))
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert same(whole(source, f"optimizer/state/{name}/{key}"), value)
    groups = source.values["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    for number, (group, expected) in enumerate(zip(groups, (0.1, 0.2), strict=True)):
        path = f"optimizer/param_groups/{number}/lr"
        assert (whole(source, path) == torch.tensor(expected)) if as_tensor else group["lr"] == expected


@each_row("world_size", [1, 3, 20])
def test_torch_loads_what_is_written(world_size: int, tmp_path: Path) -> None:
    """`dcp.load` fills tensors and values of the same tree with what was saved, from any number of files."""
    tree = {**state(), "model": awkward()}
    assert len(write_dcp(as_source(tmp_path / "a.pt", tree), tmp_path / "d", world_size=world_size)) == world_size
    found = _blank(tree)
    dcp.load(found, checkpoint_id=tmp_path / "d", no_dist=True)
    _assert_same_tree(found, tree)


def _blank(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _blank(value) for key, value in tree.items()}
    if isinstance(tree, list) and any(isinstance(each, dict) for each in tree):
        return [_blank(each) for each in tree]
    return torch.zeros(tree.shape, dtype=tree.dtype) if isinstance(tree, torch.Tensor) else "blank"


def _assert_same_tree(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert same(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_same_tree(found[key], expected[key])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            _assert_same_tree(one, other)
    else:
        assert found == expected


def test_metadata_is_what_torch_writes(tmp_path: Path) -> None:
    """The entries, chunks, properties and paths of a written directory equal those that torch 2.11 writes.

    torch 2.15 adds the strides of each tensor, and cannot be read by those before; all can read what has none.
    """
    tree = state()
    torchs = pickle.loads((saved(tmp_path / "t", tree) / ".metadata").read_bytes())
    for entry in torchs.state_dict_metadata.values():
        properties = getattr(entry, "properties", None)
        if getattr(properties, "strides", None) is not None:
            properties.strides = None
    write_dcp(as_source(tmp_path / "a.pt", tree), tmp_path / "d")
    ours = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    assert ours.state_dict_metadata == torchs.state_dict_metadata
    assert ours.planner_data == torchs.planner_data
    assert set(ours.storage_data) == set(torchs.storage_data)
    assert ours.version == torchs.version


def test_the_two_directories_of_accelerate(tmp_path: Path) -> None:
    """A directory of the model and one of the optimizer are one checkpoint."""
    tree = state()
    saved(tmp_path / "pytorch_model_fsdp_0", {"model": tree["model"]})
    saved(tmp_path / "optimizer_0", {"optimizer": tree["optimizer"]})
    del tree["extra"]
    assert_same_source(open_source(tmp_path), as_source(tmp_path / "a.pt", tree))


def test_the_directory_of_lightning(tmp_path: Path) -> None:
    """Lightning's names of the parts are known, and its other file is left alone."""
    tree = state()
    saved(tmp_path / "d", {"model": tree["model"], "optimizer_0": tree["optimizer"]})
    torch.save({"epoch": 3}, tmp_path / "d" / "meta.pt")
    del tree["extra"]
    assert_same_source(open_source(tmp_path / "d"), as_source(tmp_path / "a.pt", tree))


def grid(path: Path, change: Callable[[Metadata], object] = lambda metadata: None) -> torch.Tensor:
    """A directory with a tensor of two dimensions in boxes of both, one of them stored transposed."""
    path.mkdir()
    tensor = torch.arange(7 * 9, dtype=torch.float32).view(7, 9)
    chunks, places, data = [], {}, io.BytesIO()
    for rows in (slice(0, 3), slice(3, 7)):
        for columns in (slice(0, 4), slice(4, 9)):
            part = tensor[rows, columns].contiguous()
            start = data.tell()
            torch.save(part.t().contiguous().t() if columns.start else part, data)
            offset = (rows.start, columns.start)
            chunks.append(ChunkStorageMetadata(torch.Size(offset), part.shape))
            places[MetadataIndex("model.w", offset)] = _StorageInfo("data.bin", start, data.tell() - start)
    (path / "data.bin").write_bytes(data.getvalue())
    properties = TensorProperties(torch.float32)
    metadata = Metadata({"model.w": TensorStorageMetadata(properties, tensor.shape, chunks)}, None, places)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return tensor


def test_boxes_of_two_dimensions(tmp_path: Path) -> None:
    """Any range of a tensor that is cut along both dimensions is read out of its boxes."""
    tensor = grid(tmp_path / "d").flatten()
    source = open_dcp(tmp_path / "d")
    for start in range(0, 63, 5):
        for stop in range(start, 64, 7):
            found = torch.cat([tensor[:0], *source.read("model/w", Span(start, stop))])
            assert torch.equal(found, tensor[start:stop])


def _entry(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["model.w"]


def _set_all(metadata: Metadata, **fields: Any) -> None:
    for info in metadata.storage_data.values():
        vars(info).update(fields)


@each_row(
    ("change", "complaint"),
    [
        (lambda m: _entry(m).chunks.pop(), "do not make up a tensor"),
        (lambda m: setattr(_entry(m), "size", torch.Size((7, 10))), "do not make up a tensor"),
        (lambda m: m.storage_data.popitem(), "does not describe a checkpoint"),
        (lambda m: _set_all(m, relative_path="../x"), "expected a file of the directory, found"),
        (lambda m: _set_all(m, relative_path="/etc/passwd"), "expected a file of the directory, found"),
        (lambda m: _set_all(m, transform_descriptors=["zstd"]), "only torch can undo"),
        (lambda m: _set_all(m, offset=-1), "has no bytes"),
        (lambda m: setattr(_entry(m).properties, "dtype", 3), "dtype"),
    ],
)
def test_metadata_that_cannot_be(change: Callable[[Metadata], object], complaint: str, tmp_path: Path) -> None:
    """Chunks that leave something out, and places that are none, are refused when the directory is opened."""
    grid(tmp_path / "d", change)
    with pytest.raises(CheckpointError, match=complaint):
        open_dcp(tmp_path / "d")


def test_chunks_that_overlap(tmp_path: Path) -> None:
    """Chunks that are as many elements as the tensor, but not the same, are refused."""

    def change(metadata: Metadata) -> None:
        chunk = _entry(metadata).chunks[3]
        moved = torch.Size((2, 4))
        metadata.storage_data[MetadataIndex("model.w", moved)] = metadata.storage_data[
            MetadataIndex("model.w", chunk.offsets)
        ]
        chunk.offsets = moved

    grid(tmp_path / "d", change)
    with pytest.raises(CheckpointError, match="overlap"):
        open_dcp(tmp_path / "d")


@each_row(
    ("fields", "complaint"),
    [
        ({"relative_path": "gone"}, "cannot be opened|cannot be read"),
        ({"length": 10**9}, "cut short"),
        ({"offset": 7}, "not a whole archive"),
    ],
)
def test_places_that_are_wrong(fields: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """A chunk that is not where the metadata says is an error that names file and tensor when it is read."""
    grid(tmp_path / "d", lambda metadata: _set_all(metadata, **fields))
    with pytest.raises(CheckpointError, match=complaint):
        whole(open_dcp(tmp_path / "d"), "model/w")
    assert verify_source(open_dcp(tmp_path / "d")).problems


def test_a_chunk_of_another_shape(tmp_path: Path) -> None:
    """A chunk whose file has another shape is refused: it is of a different save."""

    def swap(metadata: Metadata) -> None:
        first, second, *_ = metadata.storage_data.values()
        vars(first)["offset"], vars(first)["length"] = second.offset, second.length

    grid(tmp_path / "d", swap)
    with pytest.raises(CheckpointError, match=r"should be a tensor of shape \(3, 4\)"):
        whole(open_dcp(tmp_path / "d"), "model/w")


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    """A flipped bit of a chunk, which torch loads without a word, is an error, and `verify_source` lists it."""
    tensor = torch.randn(64, 64)
    file = saved(tmp_path / "d", {"model": {"w": tensor}}) / "__0_0.distcp"
    at = file.read_bytes().index(bytes(tensor[0].view(torch.uint8).tolist()))
    flip(file, at + 77, 6)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*checksum"):
        whole(open_dcp(tmp_path / "d"), "model/w")
    assert "checksum" in verify_source(open_dcp(tmp_path / "d")).problems[0]


def test_a_missing_file(tmp_path: Path) -> None:
    """A directory without one of its files is opened for its structure, and says which is missing when it is read."""
    path = saved(tmp_path / "d", {"model": {"w": torch.ones(3)}})
    shutil.move(path / "__0_0.distcp", tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        whole(open_dcp(path), "model/w")
