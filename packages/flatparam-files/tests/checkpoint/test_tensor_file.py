"""The safetensors format, streamed: what the real library reads and writes, and what is refused."""

import gc
import io
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from each_row import each_row

from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.limits import parse_json
from flatparam_files.disk.safetensors import DTYPES, Staging, TensorFileWriter, encode_header, read_header
from flatparam_files.disk.source import TensorInfo, join_path, split_path
from flatparam_files.disk.system import bytes_view

from .examples import example

EXAMPLES = {str(dtype): example(dtype, 3, 4) for dtype in DTYPES} | {
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "ünïcode / 100 %": torch.arange(5),
    'brackets [[[ {{{ and \\ "quotes" [': torch.arange(2),
}


def write(path: Path, tensors: dict[str, torch.Tensor], staging: Staging | None = None) -> None:
    """Write `tensors`, each in two chunks where it can be cut."""
    infos = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    with (
        path.open("wb", buffering=0) as file,
        TensorFileWriter(file, infos, {"a": "b"}, staging=staging) as writer,
    ):
        for name, tensor in tensors.items():
            flat = tensor.reshape(-1)
            writer.write(name, (flat[:1], flat[1:]))


@each_row("nbytes", [1, 7, 64, 2**20])
def test_the_real_library_reads_what_was_written(tmp_path: Path, nbytes: int) -> None:
    """Every dtype, an empty and a 0-d tensor come back bit for bit, through a staging buffer of any size."""
    path = tmp_path / "a.safetensors"
    write(path, EXAMPLES, Staging(nbytes))
    found = safetensors.torch.load_file(path)
    for name, tensor in EXAMPLES.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bytes_view(found[name]), bytes_view(tensor)), name


def test_what_the_real_library_wrote_is_understood(tmp_path: Path) -> None:
    """Names, shapes, dtypes, metadata and the place of each tensor's bytes."""
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(EXAMPLES, path, {"who": "they"})
    header = read_header(path)
    assert header.metadata == {"who": "they"}
    data = path.read_bytes()
    assert header.tensors.keys() == EXAMPLES.keys()
    for name, tensor in EXAMPLES.items():
        stored = header.tensors[name]
        assert stored.info == TensorInfo(tensor.shape, tensor.dtype)
        assert data[stored.offset :][: stored.nbytes] == bytes(bytes_view(tensor).tolist())


def test_announcements_are_binding() -> None:
    """Another name, a different dtype, too few elements and a missing tensor are refused."""
    info = {"a": TensorInfo((2,), torch.float32), "b": TensorInfo((), torch.int64)}

    def writer() -> TensorFileWriter:
        return TensorFileWriter(io.BytesIO(), info)

    with pytest.raises(ValueError, match="expected tensor 'a', found 'b'"):
        writer().write("b", [torch.tensor(1)])
    with pytest.raises(ValueError, match="expected torch.float32, found torch.int64"):
        writer().write("a", [torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="expected 2 elements, found 1"):
        writer().write("a", [torch.ones(1)])
    with pytest.raises(ValueError, match="2 announced tensors were not written"):
        writer().finish()


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


REFUSED = {
    "overlap": {"a": entry(), "b": entry(data_offsets=[4, 12])},
    "gap": {"a": entry(), "b": entry(data_offsets=[12, 20])},
    "too short": {"a": entry()},
    "too long": {"a": entry(shape=[10], data_offsets=[0, 40])},
    "huge": {"a": entry(shape=[2**62, 2**62], data_offsets=[0, 2**63])},
    "overflow to zero": {"a": entry(shape=[2**62, 4], data_offsets=[0, 0])},
    "negative": {"a": entry(shape=[-2], data_offsets=[8, 0])},
    "float": {"a": entry(shape=[2.0])},
    "bool": {"a": entry(shape=[True, 2])},
    "dtype": {"a": entry(dtype="F31")},
    "dtype is a list": {"a": entry(dtype=["F32"])},
    "extra key": {"a": entry(pickle="yes")},
    "list": [entry()],
    "metadata": {"__metadata__": {"a": 1}, "a": entry()},
    "number": {"a": 3},
}


@each_row("name", REFUSED)
def test_headers_that_lie_are_refused(name: str, tmp_path: Path) -> None:
    """Overlaps, gaps, wrong sizes, unknown dtypes and other shapes of JSON are typed errors with the file's name."""
    data = json.dumps(REFUSED[name]).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(16))
    with pytest.raises(CheckpointError, match="not a sound safetensors file") as caught:
        read_header(path)
    assert caught.value.path == str(path)


@each_row(
    "data",
    [
        b"",
        b"\0" * 9,
        b"\xff" * 8 + b"{}",
        (2**40).to_bytes(8, "little") + b"{}",
        (10**5).to_bytes(8, "little") + b"[" * 10**5,
        (6 * 10**5).to_bytes(8, "little") + b'{"a":' * 10**5 + b"1" + b"}" * (10**5 - 1),
        (9 * 10**5).to_bytes(8, "little") + (b'{"' + b"a" * 70 + b'":') * 12000 + b"1" * 12000,
        (4).to_bytes(8, "little") + b'{"\xff"',
        (6).to_bytes(8, "little") + b'{"a":N}',
        (22).to_bytes(8, "little") + b'{"a":{},"a":{}}       ',
        (5010).to_bytes(8, "little") + b'{"a":[' + b"1" * 5002 + b"]}",
    ],
)
def test_files_that_are_none_are_refused(data: bytes, tmp_path: Path) -> None:
    """Short files, absurd lengths, deep nesting, bad UTF-8, twin keys, endless numbers: a typed error, no crash."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="not a sound safetensors file"):
        read_header(path)


def test_a_dtype_that_the_format_lacks_is_refused_by_name() -> None:
    """complex128 has no name in safetensors."""
    with pytest.raises(CheckpointError, match=r"'w' of torch.complex128"):
        encode_header({"w": TensorInfo((1,), torch.complex128)})


@each_row("parts", [("model", "a.b"), ("extra", "a/b", "100%", "%2F", ""), ("x",)])
def test_paths_are_joined_and_split(parts: tuple[str, ...]) -> None:
    """Slashes and percent signs in a key do not cut it."""
    assert split_path(join_path(parts)) == parts
    assert join_path(parts).count("/") == len(parts) - 1


@each_row("is_reversed", [False, True])
def test_a_header_of_many_tensors(is_reversed: bool, tmp_path: Path) -> None:
    """Each of 20,000 tensors is described as it is, in whatever order; a long number in a name is no number.

    Python's own search for garbage is on afterwards, and off if it was off. Of the entries that are alike, each is
    checked: one that lies is found among them.
    """
    infos = {
        f"{'1' * 40}.{number}": TensorInfo((number % 3, 2), [torch.float32, torch.int8][number % 2])
        for number in range(20_000)
    }
    tree = json.loads(encode_header(infos)[8:])
    items = list(tree.items())[::-1] if is_reversed else list(tree.items())

    def header(entries: list[tuple[str, Any]]) -> Path:
        data = json.dumps(dict(entries)).encode()
        path = tmp_path / "many.safetensors"
        with path.open("wb") as file:
            file.write(len(data).to_bytes(8, "little") + data)
            file.truncate(8 + len(data) + sum(info.nbytes for info in infos.values()))
        return path

    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            found = read_header(header(items))
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
        assert {name: stored.info for name, stored in found.tensors.items()} == infos
    assert [stored.offset - found.data_start for stored in found.tensors.values()] == [
        entry["data_offsets"][0] for _, entry in items
    ]
    for shape in ([1, True], [1.0, 2], [7, 3]):
        name, entry = items[7]
        lying = [*items[:7], (name, {**entry, "shape": shape}), *items[8:]]
        with pytest.raises(CheckpointError, match=name):
            read_header(header(lying))


@each_row("digits", [31, 5000])
def test_a_number_of_many_digits(digits: int) -> None:
    """It is refused before it is made, wherever it stands."""
    with pytest.raises(ValueError, match=f"an integer of {digits:,} digits"):
        parse_json(b'{"' + b"1" * 40 + b'": [0, ' + b"9" * digits + b"]}")
    assert parse_json(b'{"' + b"1" * 40 + b'": 0.' + b"3" * 40 + b"}") == {"1" * 40: float("0." + "3" * 40)}
