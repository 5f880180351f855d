"""Files that somebody has made to do harm: no code runs, nothing crashes, nothing grows; every one is a typed error."""

import copy
import json
import os
import pickle
import random
import shutil
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from flatparam_checkpoint import Checkpointer
from flatparam_files import CheckpointError, open_checkpoint, verify_checkpoint
from flatparam_files.checkpoint.fields import read_sealed, seal, unseal
from flatparam_files.disk.safetensors import decode_header, read_header
from flatparam_files.disk.source import Span

from .small import ALONE, SmallRun

FUZZED_HEADERS = int(os.environ.get("FLATPARAM_FUZZED_HEADERS", "100000"))
FUZZED_MANIFESTS = int(os.environ.get("FLATPARAM_FUZZED_MANIFESTS", "500"))
SLOTS = ["latest", "step-00000005/manifest.json", "step-00000005/rank-00000.safetensors"]


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's directory with the checkpoint of step 5."""
    run = SmallRun(tmp_path / "run")
    run.train(5)
    run.checkpointer.close()
    return tmp_path / "run"


@pytest.mark.parametrize("saved_by", ["pickle", "torch"])
@pytest.mark.parametrize("slot", SLOTS)
def test_a_pickle_in_each_files_place_runs_nothing(slot: str, saved_by: str, root: Path, tmp_path: Path) -> None:
    """The canary stays unborn, in loading, verifying and reading."""
    canary = tmp_path / "canary"
    if saved_by == "pickle":
        (root / slot).write_bytes(pickle.dumps(Canary(canary)))
    else:
        torch.save(Canary(canary), root / slot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if slot == "latest":
            assert SmallRun(root).resume() == 5
        else:
            with pytest.raises(CheckpointError):
                SmallRun(root).resume()
            with pytest.raises(CheckpointError):
                read_header(root / slot)
            with pytest.raises(CheckpointError):
                assert not verify_checkpoint(root).is_sound
                raise CheckpointError("verified")
    assert not canary.exists()


def mutated(data: bytes, generator: random.Random) -> bytes:
    """Some bytes flipped, cut, doubled, or replaced by what is likely to hurt."""
    changed = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(changed) + 1)
        kind = generator.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            changed[at:at] = generator.choice(NASTY)
        elif kind == 2:
            changed[at : at + generator.randint(1, 20)] = b""
        elif kind == 3:
            changed[at:at] = changed[at : at + generator.randint(1, 60)]
        else:
            end = at + generator.randint(1, 4)
            changed[at:end] = generator.choice(NASTY)
    return bytes(changed)


NASTY = [b"[", b"{", b'"', b"\\", b"-", b"9" * 25, b"1e999", b"null", b"true", b"[[[[[[[[", b"\xff\xfe", b"\0", b",", b":", b'"F32"',
         b"NaN", b'{"a":', b"18446744073709551616", b"0", b'"__metadata__":{"a":"b"},', b"\\ud800", b'"shape":[],', b"4294967296"]  # fmt: skip


def test_mutated_headers(tmp_path: Path) -> None:
    """100 000 mutated headers: each is a sound description of the file, or a ValueError; memory stays small."""
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(
        {"a": torch.ones(3, 2), "b": torch.zeros(5, dtype=torch.int64), "c.d": torch.ones(()).bool()},
        path,
        {"k": "v"},
    )
    data = path.read_bytes()
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    generator = random.Random(1)

    def refused(count: int) -> int:
        number = 0
        for _ in range(count):
            try:
                found = decode_header(mutated(header, generator), len(data))
            except ValueError:
                number += 1
            else:
                assert sum(each.nbytes for each in found.tensors.values()) == len(data) - found.data_start
        return number

    assert refused(FUZZED_HEADERS) > FUZZED_HEADERS * 0.9
    tracemalloc.start()
    try:
        refused(FUZZED_HEADERS // 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(data) + 2**20


@pytest.mark.long
def test_mutated_files(tmp_path: Path) -> None:
    """Whole files, mutated anywhere: our reader raises its error, or reads what the real library reads."""
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3, 2), "b": torch.zeros(5, dtype=torch.int64)}, path)
    data = path.read_bytes()
    generator = random.Random(2)
    for _ in range(min(FUZZED_HEADERS, 3000)):
        path.write_bytes(mutated(data, generator))
        try:
            header = read_header(path)
        except CheckpointError:
            continue
        assert sum(stored.nbytes for stored in header.tensors.values()) == header.file_nbytes - header.data_start


def test_mutated_sealed_bytes(root: Path) -> None:
    """No mutation of a sealed file passes, and none raises anything but a ValueError."""
    data = (root / SLOTS[1]).read_bytes()
    generator = random.Random(3)
    for _ in range(FUZZED_MANIFESTS):
        changed = mutated(data, generator)
        if changed != data:
            with pytest.raises(ValueError, match=r"."):
                unseal(changed)


def paths_in(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there are values in a JSON tree."""
    found = [at]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        found += paths_in(item, (*at, key))
    return found


REPLACEMENTS: list[Any] = [None, -1, 2**70, 1.5, True, "", "x" * 32, "../../etc/passwd", [], {}, [[]], {"$tensor": "nowhere"}, {"$tuple": 1},
                           0, 1, 10**9, {"$dict": [[{"$dict": []}, 1]]}, {"$inline": ["float32", [2**40], ""]}, "complex128"]  # fmt: skip


@pytest.mark.parametrize("manifests", [FUZZED_MANIFESTS // 5, pytest.param(FUZZED_MANIFESTS, marks=pytest.mark.long)])
def test_resealed_manifests(manifests: int, root: Path) -> None:
    """Manifests that lie, with a right hash: a CheckpointError, or a load that is none the worse; memory stays small."""
    path = root / SLOTS[1]
    content = read_sealed(path)
    places = [at for at in paths_in(content) if at]
    generator = random.Random(4)
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(manifests):
            tree = copy.deepcopy(content)
            at = generator.choice(places)
            where = tree
            for key in at[:-1]:
                where = where[key]
            where[at[-1]] = generator.choice(REPLACEMENTS)
            path.write_bytes(seal(tree))
            refused += not is_loaded(root)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused > manifests / 2
    assert peak < 2**23


def is_loaded(root: Path) -> bool:
    """Whether the checkpoint can be opened, read in full and loaded; the only other end is a CheckpointError."""
    run = SmallRun(root)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_checkpoint(root) as reader:
                assert json.dumps(sorted(reader.tensors)) is not None
                assert reader.values is not None
                for at, info in reader.tensors.items():
                    if info.numel < 10**6:
                        list(reader.read(at, Span(0, info.numel)))
            run.checkpointer.load()
    except CheckpointError:
        return False
    return True


def test_nothing_outside_the_directory_is_read(root: Path, tmp_path: Path) -> None:
    """A manifest that names a file elsewhere is refused."""
    content = read_sealed(root / SLOTS[1])
    shutil.copy(root / SLOTS[2], tmp_path / "elsewhere.safetensors")
    content["files"][0][0] = "../../elsewhere.safetensors"
    (root / SLOTS[1]).write_bytes(seal(content))
    with pytest.raises(CheckpointError, match="must be called rank-00000"):
        Checkpointer(root, ranks=ALONE).load(5)
