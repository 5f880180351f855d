"""Files of torch.save, both ways."""

import gc
import json
import os
import sys
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row

from flatparam_core import Span
from flatparam_files import open_source, select, verify_source, write_torch_file
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.formats import torch_files
from flatparam_files.formats.output import SparseFile
from flatparam_files.formats.torch_archive import write_archive
from flatparam_files.formats.torch_files import open_torch_file

from .samples import assert_same_source, awkward, contents, flip, plain, same, state, whole


def saved(path: Path, root: Any) -> Path:
    """The file, written by torch."""
    torch.save(root, path)
    return path


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    """Views, shared storages, all strides and dtypes, no dimensions and no elements: bit-equal to what was saved."""
    source = open_torch_file(saved(tmp_path / "m.pt", awkward()))
    found = {path: tensor for path, tensor in contents(source).items()}
    assert list(found) == [f"model/{name.replace('%', '%25').replace('/', '%2F')}" for name in awkward()]
    for tensor, expected in zip(found.values(), awkward().values(), strict=True):
        assert same(tensor, expected)


@each_row("mmap", [False, True])
def test_torch_loads_what_is_written(mmap: bool, tmp_path: Path) -> None:
    """`torch.load(weights_only=True)` finds the same tensors, shared where they were, and the same values."""
    tree = {**state(), "model": awkward()}
    write_torch_file(open_torch_file(saved(tmp_path / "a.pt", tree)), tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True, mmap=mmap)
    assert list(found["model"]) == list(tree["model"])
    for name, tensor in tree["model"].items():
        assert same(found["model"][name], tensor), name
    for name, values in tree["optimizer"]["state"].items():
        for key, tensor in values.items():
            assert same(found["optimizer"]["state"][name][key], tensor)
    assert found["optimizer"]["param_groups"] == tree["optimizer"]["param_groups"]
    assert same(found["extra"].pop("order"), tree["extra"].pop("order"))
    assert found["extra"] == tree["extra"]
    assert found["model"]["tied.a"].data_ptr() == found["model"]["tied.b"].data_ptr()


def test_the_archive_is_sound(tmp_path: Path) -> None:
    """It is a zip file with right checksums, tensors at multiples of 64 bytes, and holes where there are zeros."""
    tree = {"ones": torch.ones(5), "zeros": torch.zeros(4 << 20), "also": torch.ones(3)}
    write_torch_file(open_torch_file(saved(tmp_path / "a.pt", tree)), tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None
    for storage in open_torch_file(tmp_path / "b.pt").stored.values():
        assert next(storage.storages()).start % 64 == 0
    assert (tmp_path / "b.pt").stat().st_blocks * 512 < 1 << 20


def test_equal_checkpoints_become_equal_bytes(tmp_path: Path) -> None:
    """Writing the same source twice gives the same file, whatever its name."""
    source = open_torch_file(saved(tmp_path / "a.pt", state()))
    write_torch_file(source, tmp_path / "b.pt")
    write_torch_file(source, tmp_path / "c.pt")
    assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "c.pt").read_bytes()


@each_row("part", ["model", "optimizer"])
def test_a_part_alone_is_its_state_dict(part: str, tmp_path: Path) -> None:
    """A model alone is written as `model.load_state_dict` takes it, an optimizer alone as FSDP has it."""
    tree = state()
    source = open_torch_file(saved(tmp_path / "a.pt", tree))
    write_torch_file(select(source, [part]), tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert list(found) == list(tree[part])
    assert_same_source(open_source(tmp_path / "b.pt"), select(source, [part]))


@pytest.mark.parametrize("model", ["model", "model_state_dict", "state_dict"])
@pytest.mark.parametrize("optimizer", ["optimizer", "optim", "optimizer_state_dict", "optim_state_dict"])
def test_names_of_the_parts(model: str, optimizer: str, tmp_path: Path) -> None:
    """The usual names of a model and an optimizer in a file are known; what else there is, is extra."""
    tree = state()
    file = saved(tmp_path / "a.pt", {model: tree["model"], optimizer: tree["optimizer"], **tree["extra"]})
    assert_same_source(open_torch_file(file), open_torch_file(saved(tmp_path / "b.pt", tree)))


def test_a_list_with_one_optimizer(tmp_path: Path) -> None:
    """Lightning's list of optimizer states is the optimizer where it has one."""
    tree = state()
    lightning = {"state_dict": tree["model"], "optimizer_states": [tree["optimizer"]], "extra": tree["extra"]}
    found = open_torch_file(saved(tmp_path / "a.ckpt", lightning))
    assert_same_source(found, open_torch_file(saved(tmp_path / "b.pt", tree)))


def test_the_two_files_of_accelerate(tmp_path: Path) -> None:
    """A model's file and an optimizer's are one checkpoint, given as two paths or as their directory."""
    tree = state()
    tree.pop("extra")
    saved(tmp_path / "pytorch_model_fsdp.bin", OrderedDict(tree["model"]))
    saved(tmp_path / "optimizer.bin", tree["optimizer"])
    both = open_source(tmp_path / "pytorch_model_fsdp.bin", tmp_path / "optimizer.bin")
    assert_same_source(both, open_torch_file(saved(tmp_path / "all.pt", tree)))
    assert_same_source(both, open_source(tmp_path))
    with pytest.raises(CheckpointError, match="has 'model', and so has another"):
        open_torch_file(*[tmp_path / "pytorch_model_fsdp.bin"] * 2)


def stepped(**arguments: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model with buffers after a step of its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    named = arguments.pop("named", False)
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), **arguments)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@each_row("named", [False, True])
def test_states_by_number_get_names(named: bool, tmp_path: Path) -> None:
    """A plain optimizer's state is brought to names: those that it has, or those of the model in their order."""
    model, optimizer = stepped(named=named)
    file = saved(tmp_path / "a.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    source = open_torch_file(file)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert same(whole(source, f"optimizer/state/{name}/{key}"), value)
    assert source.values["optimizer"]["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]


def test_states_by_number_of_tied_weights(tmp_path: Path) -> None:
    """A tied weight counts once, under its first name."""
    model, _ = stepped()
    tied = torch.nn.Module()
    tied.a, tied.b = model, model[0]
    optimizer = torch.optim.SGD(tied.parameters(), momentum=0.9)
    optimizer.step()
    file = saved(tmp_path / "a.pt", {"model": tied.state_dict(), "optimizer": optimizer.state_dict()})
    groups = open_torch_file(file).values["optimizer"]["param_groups"]
    assert groups[0]["params"] == ["a.0.weight", "a.0.bias", "a.1.weight", "a.1.bias"]


def _wrong_shape(root: dict[str, Any]) -> None:
    root["optimizer"]["state"][0]["exp_avg"] = torch.ones(7)


def _two_groups(root: dict[str, Any]) -> None:
    group = root["optimizer"]["param_groups"][0]
    root["optimizer"]["param_groups"] = [{**group, "params": [0, 1]}, {**group, "params": [2, 3]}]


@each_row(
    ("change", "complaint"),
    [
        (lambda root: root["model"].popitem(), "it has 4 parameters, and the model 3 tensors"),
        (_wrong_shape, "the state of number 0 is not shaped like '0.weight'"),
        (_two_groups, "it has 2 parameter groups"),
        (lambda root: root["optimizer"]["param_groups"][0]["params"].pop(), "it has 3 parameters"),
    ],
)
def test_unclear_numbers_are_refused(change: Any, complaint: str, tmp_path: Path) -> None:
    """Where a number could mean another parameter, that is an error that says why and what to do."""
    model, optimizer = stepped()
    root = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    change(root)
    with pytest.raises(CheckpointError, match=f"{complaint}.*Save the state by name: FSDP.optim_state_dict"):
        open_torch_file(saved(tmp_path / "a.pt", root))


@each_row(
    ("root", "complaint"),
    [
        (torch.ones(3), "holds a single tensor"),
        ([1, 2], "holds a list"),
        ({"epoch": 3}, "has no model.*found 'epoch'"),
        ({"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.ones(1)}}, "several models"),
        (
            {"model": {"w": torch.ones(1)}, "optimizer": {"state": {"w": 3}}},
            "optimizer's state is not of the form",
        ),
    ],
)
def test_unclear_files_are_refused(root: Any, complaint: str, tmp_path: Path) -> None:
    """A file in which no model can be told from the rest is an error that says what was found."""
    with pytest.raises(CheckpointError, match=rf"a\.pt.*{complaint}"):
        open_torch_file(saved(tmp_path / "a.pt", root))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Neither text nor a file of torch before 1.6 is taken for an archive, and the error says what to do."""
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("hello")
    for name in ("old.pt", "text.pt"):
        with pytest.raises(CheckpointError, match=rf"{name}.*load it and save|{name}.*loaded and\s+saved again"):
            open_source(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "zip.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"x" * 1000)
    with pytest.raises(CheckpointError, match="compressed"):
        open_source(tmp_path / "zip.pt")


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    """A flipped bit of a tensor is an error when it is read, and a problem that `verify_source` lists."""
    file = saved(tmp_path / "a.pt", {"w": torch.randn(1000), "v": torch.ones(3)})
    start = next(open_torch_file(file).stored["model/w"].storages()).start
    flip(file, start + 1234, 3)
    source = open_torch_file(file)
    with pytest.raises(CheckpointError, match=r"a\.pt.*expected\s+checksum"):
        list(source.read("model/w", Span(0, 3)))
    assert same(whole(source, "model/v"), torch.ones(3))
    assert len(verify_source(open_torch_file(file)).problems) == 1


def test_a_file_without_checksums(tmp_path: Path) -> None:
    """torch can be told to compute none; then the file is read, and said to be unproven."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        file = saved(tmp_path / "a.pt", {"w": torch.ones(10)})
    finally:
        torch.serialization.set_crc32_options(before)
    source = open_torch_file(file)
    assert same(whole(source, "model/w"), torch.ones(10))
    found = verify_source(source)
    assert (found.nbytes, found.unproven_nbytes, found.problems) == (40, 40, ())


def test_an_existing_file_stays(tmp_path: Path) -> None:
    """Writing to a name that is taken is refused, and what fails leaves nothing behind."""
    source = open_torch_file(saved(tmp_path / "a.pt", state()))
    before = (tmp_path / "a.pt").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        write_torch_file(source, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == before
    flip(tmp_path / "a.pt", next(source.stored["model/0.weight"].storages()).start)
    with pytest.raises(CheckpointError, match="checksum"):
        write_torch_file(source, tmp_path / "b.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_tensors_among_the_extra(tmp_path: Path) -> None:
    """Tensors in lists and tuples of what a program keeps are found and written back in their places."""
    root = {
        "model": {"w": torch.ones(1)},
        "rng": [torch.arange(3), {"x": torch.arange(2)}],
        "pair": (1, torch.ones(2)),
    }
    source = open_torch_file(saved(tmp_path / "a.pt", root))
    assert plain(source.values)["extra"] == {"rng": [None, {}], "pair": [1, None]}
    write_torch_file(source, tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)["extra"]
    assert same(found["rng"][0], torch.arange(3))
    assert same(found["rng"][1]["x"], torch.arange(2))
    assert same(found["pair"][1], torch.ones(2))


@each_row("kind", [torch.Tensor.clone, torch.nn.Parameter])
def test_tensors_with_attributes(kind: Any, tmp_path: Path) -> None:
    """A tensor with an attribute, as the full state of torch's FSDP1 has them, is that tensor."""
    tensor = kind(torch.arange(6.0).view(2, 3))
    tensor._is_full = True
    assert same(whole(open_torch_file(saved(tmp_path / "a.pt", {"w": tensor})), "model/w"), tensor)


def test_shards_of_hugging_face(tmp_path: Path) -> None:
    """pytorch_model.bin, alone or in shards with an index, is the model, given as a directory or as the index."""
    (tmp_path / "one").mkdir()
    saved(tmp_path / "one" / "pytorch_model.bin", awkward())
    one = open_source(tmp_path / "one")
    names = list(awkward())
    files = {name: f"pytorch_model-{index % 2 + 1:05d}-of-00002.bin" for index, name in enumerate(names)}
    for file in set(files.values()):
        saved(tmp_path / file, {name: awkward()[name] for name in names if files[name] == file})
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert_same_source(open_source(tmp_path), one)
    assert_same_source(open_source(index), one)
    (tmp_path / files[names[1]]).unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002.bin"):
        open_source(tmp_path)


def test_values_that_programs_keep(tmp_path: Path) -> None:
    """The state of PyTorch's MultiStepLR, numbers as keys, sets and byte arrays come back as they were."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]).state_dict()
    kept = {"schedule": schedule, "counts": {1: 2, 30: 4}, "seen": {1, "a", None}, "raw": bytearray(b"q")}
    root = {"model": {"w": torch.ones(1)}, **kept}
    source = open_torch_file(saved(tmp_path / "a.pt", root))
    assert source.values["extra"] == kept
    assert type(source.values["extra"]["schedule"]["milestones"]) is Counter
    write_torch_file(source, tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)["extra"]
    assert found == {**kept, "raw": b"q"}
    assert type(found["schedule"]["milestones"]) is Counter


def test_keys_of_one_text(tmp_path: Path) -> None:
    """Two keys that would be one path are refused: neither tensor is lost without a word."""
    with pytest.raises(CheckpointError, match=r"two tensors would be at 'extra/t/1'"):
        open_torch_file(saved(tmp_path / "a.pt", {"model": {}, "t": {1: torch.ones(1), "1": torch.ones(1)}}))


class Interrupting:
    """Inside, `KeyboardInterrupt` comes at the step number `at` of Python's code, once; the steps are counted."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0

    def _step(self, frame: object, event: str, argument: object) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise KeyboardInterrupt
        return self._step

    def __enter__(self) -> "Interrupting":
        sys.settrace(self._step)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def test_interrupted_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever an interrupt comes, in `zipfile` too, that is what comes out, and no file is left."""
    source = open_torch_file(saved(tmp_path / "a.pt", {"model": {"a": torch.ones(3), "b": torch.zeros(2)}}))
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: told.append(raised.exc_value))

    def write(at: int) -> int:
        interrupting = Interrupting(at)

        def interrupted(file: SparseFile, root: Any) -> None:
            with interrupting:
                write_archive(file, root)

        with monkeypatch.context() as patched:
            patched.setattr(torch_files, "write_archive", interrupted)
            write_torch_file(source, tmp_path / "b.pt")
        return interrupting.seen

    for _ in range(2):  # the second time, all caches are filled
        steps = write(0)
        (tmp_path / "b.pt").unlink()
    assert steps > 1000
    lost = 0
    for at in range(1, steps):
        try:
            write(at)
        except KeyboardInterrupt:
            assert os.listdir(tmp_path) == ["a.pt"], at
        else:
            # Python has no way out of a finalizer: it is told on stderr.
            (tmp_path / "b.pt").unlink()
            lost += 1
    gc.collect()
    assert [type(error) for error in told] == [KeyboardInterrupt] * lost
    assert lost < steps / 100


def test_every_record_has_its_checksum_compared(tmp_path: Path) -> None:
    """Also those that have no tensor, such as the alignment, without which torch does not open the file."""
    path = saved(tmp_path / "m.pt", {"weight": torch.ones(3)})
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        small = [info for info in archive.infolist() if "/data/" not in info.filename and info.file_size]
        content_of = {info.filename: archive.read(info) for info in small}
    assert len(small) > 2
    for name, record in content_of.items():
        at = content.index(record, content.index(name.encode()) + len(name))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match="checksum"):
            open_torch_file(path)
