"""Pickles of unknown origin: nothing in them runs, and what is odd is refused."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st

from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.formats.dcp_reader import open_dcp
from flatparam_files.formats.pickle_reader import AdmittedNames, read_pickle
from flatparam_files.formats.pickle_writer import pickle_of
from flatparam_files.formats.torch_archive import TORCH_NAMES
from flatparam_files.formats.torch_files import open_torch_file


class Canary:
    """An object whose unpickling would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@each_row("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_code_is_refused_and_not_run(protocol: int, tmp_path: Path) -> None:
    """A pickle that names a function is refused by that name, and the function is not called."""
    with pytest.raises(CheckpointError, match=r"the file holds '(posix|nt|os)\.mkdir'"):
        read_pickle(pickle.dumps([Canary(tmp_path / "canary")], protocol), TORCH_NAMES, what="the file")
    assert not (tmp_path / "canary").exists()


def test_code_in_files_is_refused_and_not_run(tmp_path: Path) -> None:
    """The same in a file of torch.save, in the metadata of a DCP directory, and in one of its entries."""
    torch.save({"w": torch.ones(2), "x": Canary(tmp_path / "canary")}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt.*nothing of it was run"):
        open_torch_file(tmp_path / "x.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    with pytest.raises(CheckpointError, match=r"\.metadata.*nothing of it was run"):
        open_dcp(tmp_path / "dcp")
    assert not (tmp_path / "canary").exists()


@each_row(
    ("data", "complaint"),
    [
        (b"\x80\x02\x82\x01.", "the opcode EXT1"),
        (b"\x80\x02(i__main__\nA\n.", "the opcode INST"),
        (b"\x80\x02}(]K\x01u.", "a list as the key"),
        (b"\x80\x02(K\x01K\x02u.", "damaged"),
        (b"\x80\x02a.", "damaged"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"\x80\x02K\x01K\x02.", "damaged"),
        (b"\x80\x02X\xff\xff\xff\x7fab.", "damaged"),
        (b"\x80\x02K\x01K\x01R.", "damaged"),
        (b"\x80\x02}K\x01b", "damaged"),
        (b"", "damaged"),
    ],
)
def test_odd_pickles_are_refused(data: bytes, complaint: str) -> None:
    """What no checkpoint has, or what is cut short, is a CheckpointError that names the file."""
    with pytest.raises(CheckpointError, match=f"the file.*{complaint}"):
        read_pickle(data, TORCH_NAMES, what="the file")


def test_a_large_memo_index_takes_no_memory() -> None:
    """An index for which Python's unpickler would reserve gigabytes is only a number here."""
    data = b"\x80\x02K\x05r" + struct.pack("<I", 0x7FFFFFFF) + b"."
    assert read_pickle(data, TORCH_NAMES, what="the file") == 5


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_are_read_as_python_reads_them(value: Any) -> None:
    """What Python pickles is what is read, in every protocol; what is written is what Python and torch read."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert read_pickle(pickle.dumps(value, protocol), TORCH_NAMES, what="it") == value
    written = pickle_of(value)
    assert pickle.loads(written) == value
    assert read_pickle(written, TORCH_NAMES, what="it") == value


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Whatever the bytes, there is a value or a CheckpointError."""
    try:
        read_pickle(b"\x80\x02" + data, AdmittedNames({}, {}), what="it")
    except CheckpointError as error:
        assert "it" in str(error)


def test_a_value_without_a_form_is_refused() -> None:
    """An object that only a pickle of Python's could hold is not written."""
    with pytest.raises(CheckpointError, match="of type object"):
        pickle_of({"x": object()})


def test_bytes_of_a_number_take_no_memory() -> None:
    """`bytearray(10**15)`, which Python would reserve, is refused."""
    with pytest.raises(CheckpointError, match="damaged"):
        read_pickle(
            b"\x80\x02cbuiltins\nbytearray\n\x8a\x07\x00\x80\xc6\xa4\x7e\x8d\x03\x85R.",
            TORCH_NAMES,
            what="it",
        )
