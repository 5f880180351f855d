"""Safetensors as Hugging Face libraries have them, both ways."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from each_row import each_row

from flatparam_core import Span
from flatparam_files import cast_model, open_source, verify_source
from flatparam_files import write_hugging_face as write
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.source import Source
from flatparam_files.formats.hugging_face import open_hugging_face
from flatparam_files.formats.torch_files import open_torch_file

from .samples import awkward, contents, same, state, whole


def as_source(path: Path, model: dict[str, torch.Tensor]) -> Source:
    """The model, by way of a file of torch.save."""
    torch.save(model, path)
    return open_torch_file(path)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library finds in the files of a directory."""
    files = sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


def test_one_file(tmp_path: Path) -> None:
    """A small model is one file that the safetensors library loads bit for bit; tied weights are there once."""
    source = as_source(tmp_path / "a.pt", awkward())
    files = write(source, tmp_path / "hf")
    assert list(files) == [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    found = loaded(tmp_path / "hf")
    assert found.keys() == awkward().keys() - {"tied.b"}
    assert all(same(tensor, awkward()[name]) for name, tensor in found.items())
    with safetensors.safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@each_row("max_shard_nbytes", [1, 300, 1000, 4000])
def test_shards(max_shard_nbytes: int, tmp_path: Path) -> None:
    """No file has more bytes than asked for, unless it has one tensor; the index says what is where, and how much."""
    write(as_source(tmp_path / "a.pt", awkward()), tmp_path / "hf", max_shard_nbytes=max_shard_nbytes)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    total = 0
    for name in sorted(set(index["weight_map"].values())):
        tensors = safetensors.torch.load_file(tmp_path / "hf" / name)
        assert sorted(tensors) == sorted(key for key, file in index["weight_map"].items() if file == name)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        assert nbytes <= max_shard_nbytes or len(tensors) == 1
        total += nbytes
    assert index["metadata"] == {"total_size": total}
    count = len(set(index["weight_map"].values()))
    assert set(index["weight_map"].values()) == {
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    }
    found = contents(open_source(tmp_path / "hf"))
    assert len(found) == len(awkward()) - 1
    assert all(same(tensor, loaded(tmp_path / "hf")[path.split("/")[1].replace("%2F", "/").replace("%25", "%")])
               for path, tensor in found.items())  # fmt: skip


def test_a_single_file_by_name(tmp_path: Path) -> None:
    """A name that ends with .safetensors becomes that file, whatever the size of shards; it is read again."""
    write(as_source(tmp_path / "a.pt", awkward()), tmp_path / "m.safetensors", max_shard_nbytes=1)
    assert len(open_source(tmp_path / "m.safetensors").tensors) == len(awkward()) - 1


@each_row("kind", ["model.safetensors", "pytorch_model.bin"])
def test_one_file_before_shards(kind: str, tmp_path: Path) -> None:
    """In a folder that has one file and an index it is the file that counts, as with transformers, which leaves both."""
    shard = "shard.safetensors" if kind.endswith("s") else "shard.bin"
    for name, value in ((kind, 1.0), (shard, 2.0)):
        model = {"w": torch.full((2,), value)}
        if kind.endswith("s"):
            safetensors.torch.save_file(model, tmp_path / name)
        else:
            torch.save(model, tmp_path / name)
    (tmp_path / f"{kind}.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    assert whole(open_source(tmp_path), "model/w").tolist() == [1.0, 1.0]
    (tmp_path / shard).unlink()
    assert whole(open_source(tmp_path), "model/w").tolist() == [1.0, 1.0]


def test_what_the_library_wrote(tmp_path: Path) -> None:
    """A file of the safetensors library is read bit for bit, and said to have no checksums."""
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in awkward().items()}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    source = open_hugging_face(tmp_path / "m.safetensors")
    assert all(same(whole(source, f"model/{name.replace('%', '%25').replace('/', '%2F')}"), tensor)
               for name, tensor in tensors.items())  # fmt: skip
    found = verify_source(source)
    assert found.problems == ()
    assert found.unproven_nbytes == found.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_equal_models_become_equal_bytes(tmp_path: Path) -> None:
    """Writing the same model twice gives the same files."""
    source = as_source(tmp_path / "a.pt", awkward())
    for name in ("one", "two"):
        write(source, tmp_path / name, max_shard_nbytes=500)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


@each_row("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Floating-point tensors of the model are cast as torch casts them, and others stay; so does the optimizer."""
    torch.save({**state(), "model": awkward()}, tmp_path / "a.pt")
    source = open_torch_file(tmp_path / "a.pt")
    cast = cast_model(source, dtype)
    for path, tensor in contents(source).items():
        is_cast = path.startswith("model/") and tensor.is_floating_point()
        assert same(whole(cast, path), tensor.to(dtype) if is_cast else tensor), path
        assert cast.tensors[path].dtype == (dtype if is_cast else tensor.dtype)
    write(cast, tmp_path / "hf")
    assert loaded(tmp_path / "hf")["float32"].dtype == dtype
    with pytest.raises(CheckpointError, match="cannot be cast to torch.int8"):
        cast_model(source, torch.int8)


def test_what_safetensors_cannot_hold(tmp_path: Path) -> None:
    """A model with values that are no tensors, one with a different dtype, and no model at all, are refused."""
    with pytest.raises(CheckpointError, match="holds 'extra_state', which are no tensors"):
        write(as_source(tmp_path / "a.pt", {"w": torch.ones(1), "extra_state": 3}), tmp_path / "hf")
    with pytest.raises(CheckpointError, match="complex128: safetensors cannot hold it"):
        write(as_source(tmp_path / "b.pt", {"w": torch.ones(1, dtype=torch.complex128)}), tmp_path / "hf")
    torch.save(state()["optimizer"], tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="expected a model for .*, found none"):
        write(open_torch_file(tmp_path / "c.pt"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@each_row(
    ("index", "complaint"),
    [
        ("[]", "has no 'weight_map'"),
        ("{", "expected JSON, found"),
        ('{"weight_map": {}}', "has no 'weight_map'"),
        ('{"weight_map": {"w": "../m.safetensors"}}', "which is not a file beside it"),
        ('{"weight_map": {"w": "gone.safetensors"}}', "gone.safetensors"),
        ('{"weight_map": {"v": "m.safetensors"}}', "says that 'v' is in m.safetensors, and it is not"),
    ],
)
def test_an_index_that_is_wrong(index: str, complaint: str, tmp_path: Path) -> None:
    """An index that is damaged, points elsewhere, or does not agree with the files, is refused."""
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=complaint):
        open_source(tmp_path)


def test_ranges(tmp_path: Path) -> None:
    """Any range of a tensor is read by itself."""
    safetensors.torch.save_file({"w": torch.arange(20.0)}, tmp_path / "m.safetensors")
    source = open_source(tmp_path / "m.safetensors")
    assert torch.cat(list(source.read("model/w", Span(3, 11)))).tolist() == list(range(3, 11))
