"""Small files that would fill the memory, or take hours: each ends in a typed error, in a child with little memory."""

import json
import os
import resource
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from flatparam_files import open_source
from flatparam_files.checkpoint.fields import _sealed, read_sealed, seal
from flatparam_files.checkpoint.values import decode, encode
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.limits import check_cost, parse_json
from flatparam_files.disk.safetensors import read_header
from flatparam_files.disk.source import Box, TensorInfo
from flatparam_files.formats import dcp_reader
from flatparam_files.formats.dcp_reader import _check_cover, _Tree

from .saved import end_of, fork, save

MIB = 2**20
# What hangs is stopped; none of these takes more than some seconds.
pytestmark = pytest.mark.timeout(600)


def refused_within(nbytes: int, read: Callable[[], object], match: str) -> None:
    """In a child that has `nbytes` of memory more than now, `read` raises a CheckpointError that says `match`."""

    def work() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + nbytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with pytest.raises(CheckpointError, match=match):
            read()

    assert end_of(fork(work)) == 0


def header_file(path: Path, header: bytes) -> Path:
    """A safetensors file that consists of its header."""
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


@pytest.mark.parametrize("letter", [b"x", b"\\n", b'\\"', b"\\\\"])
def test_a_long_string_in_a_header(letter: bytes, tmp_path: Path) -> None:
    """A string of 4 MiB takes some copies of itself; it took 480 MiB."""
    text = letter * (4 * MIB // len(letter))
    path = header_file(tmp_path / "a.safetensors", b'{"__metadata__":["' + text + b'"]}')
    refused_within(64 * MIB, lambda: read_header(path), "__metadata__ must be an object of strings")


DENSE = {
    "lists": b"[" + b"[]," * (8 * MIB // 3) + b"[]]",
    "objects": b"[" + b"{}," * (8 * MIB // 3) + b"{}]",
    "keys": b"{" + b",".join(b'"%x":0' % number for number in range(MIB)) + b"}",
    "quotes": b"[" + b'"\\\\",[],{},[],' * (8 * MIB // 14) + b"0]",
}


@pytest.mark.parametrize("kind", DENSE)
def test_a_manifest_of_small_values(kind: str, tmp_path: Path) -> None:
    """A manifest of 8 MiB of empty lists and the like is refused before any of them is made; it took 27 times as much."""
    path = tmp_path / "manifest.json"
    path.write_bytes(_sealed(DENSE[kind]))
    refused_within(150 * MIB, lambda: read_sealed(path), "so many small values that they would take about")


def test_what_no_reader_takes_is_not_written() -> None:
    """Values that a reader would refuse are refused when they are saved, and the error says what to do."""
    with pytest.raises(CheckpointError, match="too many.*save long lists of numbers as tensors"):
        seal([[] for _ in range(2 * MIB)])


def test_dense_texts_that_checkpoints_have() -> None:
    """A history of losses, a vocabulary, and the records of a million tensors are not refused."""
    history = b"[" + b",".join(b'{"step":1000,"loss":0.51234567890123}' for _ in range(MIB // 4)) + b"]"
    vocabulary = json.dumps([f"token{number}" for number in range(MIB // 2)]).encode()
    record = b'"model/%d.weight":{"dtype":"F32","shape":[4096,4096],"data_offsets":[0,67108864]}'
    header = b"{" + b",".join(record % number for number in range(MIB // 8)) + b"}"
    for text in (history, vocabulary, header, b"[" + b"0.5," * (4 * MIB) + b"1]"):
        check_cost(text)


def test_long_integers_in_json() -> None:
    """An integer of more digits than any number of a checkpoint has is a ValueError that says so."""
    with pytest.raises(ValueError, match="an integer of 4,301 digits; expected at most 30"):
        parse_json(b"[" + b"9" * 4301 + b"]")


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"$int": "0x" + "f" * 10_000}, "an integer of at most 14,000 bits, found 10,002 hexadecimal digits"),
        ({"$size": [2**70]}, r"sizes from 0 to 2\^63 - 1, found 1180591620717411303424"),
        ({"$size": [-1]}, r"sizes from 0 to 2\^63 - 1, found -1"),
        ({"$size": ["a"]}, r"sizes from 0 to 2\^63 - 1, found a"),
        ({"$size": [{"$int": "0x" + "f" * 3000}]}, r"sizes from 0 to 2\^63 - 1, found"),
    ],
)
def test_long_integers_in_values(tree: object, match: str) -> None:
    """Integers that Python cannot print, and sizes that no tensor has, are refused where they are read."""
    with pytest.raises(ValueError, match=match):
        decode(tree, lambda path: None)


def test_long_integers_that_are_saved() -> None:
    """An integer that would not be read is not saved; the longest one that is saved can be read and printed."""
    with pytest.raises(CheckpointError, match="'extra' is an integer of 14,001 bits, and 14,000 are the most"):
        encode(2**14_000, ("extra",), {})
    for longest in (2**14_000 - 1, -(2**14_000) + 1):
        assert str(decode(encode(longest, ("extra",), {}), lambda path: None)) == str(longest)


def test_shapes_that_no_tensor_has() -> None:
    """A shape of very many dimensions, or of 2^63 elements, is refused, and its product is not computed."""
    with pytest.raises(ValueError, match="at most 1,024 dimensions, found 1,000,000"):
        TensorInfo([2**62] * 1_000_000, torch.float32)
    with pytest.raises(ValueError, match=r"fewer than 2\^63 elements, found \(4611686018427387904, 2\)"):
        TensorInfo((2**62, 2), torch.float32)


def test_a_shape_of_many_dimensions_in_a_manifest(tmp_path: Path) -> None:
    """A manifest with a tensor of a million dimensions of 2^62 elements ends in an error; it took an hour."""
    save(tmp_path, 5)
    path = tmp_path / "step-00000005" / "manifest.json"
    content = read_sealed(path)
    content["tensors"]["model/weight"]["shape"] = [2**62] * 300_000
    path.write_bytes(seal(content))
    with pytest.raises(CheckpointError, match="at most 1,024 dimensions"):
        open_source(tmp_path / "step-00000005")


# Pickles


def torch_file(path: Path, value: bytes) -> Path:
    """A file of `torch.save` that holds `{"model": {}, "a": <value>}`, where `value` are opcodes."""
    data = b"\x80\x02}(X\x05\x00\x00\x00model}X\x01\x00\x00\x00a" + value + b"u."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("it/data.pkl", data)
        archive.writestr("it/version", "3")
    return path


def doubled(times: int) -> bytes:
    """A tuple of two tuples, which are one, and so on: `2 ** times` leaves."""
    return b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(times))


def popped(opcodes: bytes) -> bytes:
    """The opcodes with what they push in a tuple."""
    return b"(" + opcodes + b"t"


TEXT = b"X" + struct.pack("<I", MIB) + b"x" * MIB
DAG = popped(doubled(60)) + b"q\x7f"
MANY = "more than [0-9,]+ bytes of memory"
AGAIN = "far more values than bytes"
PICKLES = {
    "tuples, 2^19": (AGAIN, popped(doubled(19))),
    "tuples, 2^60": (AGAIN, DAG),
    "lists": (MANY, popped(b"]" * (2 * MIB))),
    "sets": (MANY, popped(b"\x8f" * MIB)),
    "memo": (MANY, popped(b"N" + b"\x94" * (2 * MIB))),
    "copies of a text": (MANY, popped(
        b"c_codecs\nencode\nq\x00" + TEXT + b"q\x01X\x06\x00\x00\x00latin1q\x02" + b"h\x00h\x01h\x02\x86R" * 1000
    )),
    "copies of a dictionary": (AGAIN, popped(
        b"ccollections\nOrderedDict\nq\x00](" + b"".join(b"(K%cNt" % n for n in range(256)) + b"eq\x01"
        + b"h\x00h\x01\x85R" * 20_000
    )),
    "a hash of tuples": (AGAIN, popped(DAG + b"ccollections\nOrderedDict\n](h\x7fN\x86e\x85R")),
    "a text of tuples": (AGAIN, popped(DAG + b"ctorch\ndevice\nh\x7fK\x00\x86R")),
    "a name of tuples": ("expected text as a name, found something else", popped(DAG + b"h\x7f\x93")),
    "a storage of tuples": (AGAIN, DAG + b"Q"),
    "a list in itself": ("a container holds itself", b"]q\x00h\x00a"),
    "a long integer": ("an integer of 31,999 bits", b"\x8b" + struct.pack("<i", 4000) + b"\x7f" * 4000),
    "keys with one hash": ("a int as the key of a dictionary", b"}(" + b"".join(
        b"\x8a\x10" + (number * (2**61 - 1)).to_bytes(16, "little", signed=True) + b"N" for number in range(100, 40_100)
    ) + b"u"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PICKLES)
def test_pickles(kind: str, tmp_path: Path) -> None:
    """A pickle whose objects or leaves are far more than its bytes is refused; 596 bytes took 36 seconds, or for ever."""
    path = torch_file(tmp_path / "it.pt", PICKLES[kind][1])
    refused_within(200 * MIB, lambda: open_source(path), PICKLES[kind][0])


def test_shared_values_that_checkpoints_have(tmp_path: Path) -> None:
    """A tuple, a list and a dictionary that thousands of entries share are read as they were saved."""
    betas, shape, settings = (0.9, 0.99), list(range(10)), {"lr": 0.1}
    groups = [{"betas": betas, "shape": shape, "settings": settings} for _ in range(5000)]
    torch.save({"model": {"a": torch.ones(1)}, "groups": groups}, tmp_path / "it.pt")
    assert open_source(tmp_path / "it.pt").values["extra"]["groups"] == groups


# Archives and directories of torch


def test_records_that_share_bytes(tmp_path: Path) -> None:
    """An archive whose records lie in each other is refused: each would be read whole."""
    path = torch_file(tmp_path / "it.pt", b"N")
    with zipfile.ZipFile(path, "a") as archive:
        for number in range(3):
            archive.writestr(f"it/data/{number}", b"x" * 64)
    data = path.read_bytes()
    # In the central directory, the third record is where the second is.
    at = data.rindex(b"PK\x01\x02")
    before = data.rindex(b"PK\x01\x02", 0, at)
    path.write_bytes(data[: at + 42] + data[before + 42 : before + 46] + data[at + 46 :])
    with pytest.raises(CheckpointError, match="two of its records share the byte|differ"):
        open_source(path)


def test_holes_in_lists(tmp_path: Path) -> None:
    """Paths that make long lists of few entries are refused; a hundred entries took 80 MB for each of their parts."""
    tree = _Tree(tmp_path, 2)
    tree.put(("a", 9000, 0), 1)
    with pytest.raises(CheckpointError, match="contradict each other"):
        tree.put(("b", 9000, 0), 1)


def grid(rows: int, columns: int) -> list[Box]:
    """The boxes of a tensor of `2 * rows` by `3 * columns`."""
    return [Box((2 * row, 3 * column), (2, 3)) for row in range(rows) for column in range(columns)]


def strips(count: int) -> Iterable[Box]:
    """Strips that lie beside each other in both halves of a tensor of `count` by `2 * count`."""
    yield from (Box((at, 0), (1, count)) for at in range(count))
    yield from (Box((0, count + at), (count, 1)) for at in range(count))


def test_chunks_in_several_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of 2,500 chunks is no matter, two that overlap are found, and what would take hours is refused."""
    boxes = grid(50, 50)
    _check_cover("a", (100, 150), boxes)
    with pytest.raises(ValueError, match="overlap"):
        _check_cover("a", (100, 150), [*boxes[:-1], Box((98, 144), (2, 3))])
    with pytest.raises(ValueError, match="overlap"):
        _check_cover("a", (4, 4), [Box((0, 0), (2, 4)), Box((1, 0), (1, 4)), Box((3, 0), (1, 4))])
    _check_cover("a", (100, 200), list(strips(100)))
    monkeypatch.setattr(dcp_reader, "_MOST_PAIRS", 100_000)
    with pytest.raises(ValueError, match="2,000 chunks that lie beside each other, which are too many"):
        _check_cover("a", (1000, 2000), list(strips(1000)))


def test_a_lock_that_is_nested(tmp_path: Path) -> None:
    """A lock file of 4,000 brackets names no owner, and stops nobody."""
    os.makedirs(tmp_path / "run")
    (tmp_path / "run" / "lock").write_bytes(b"[" * 4000)
    assert save(tmp_path / "run", 1).is_dir()
