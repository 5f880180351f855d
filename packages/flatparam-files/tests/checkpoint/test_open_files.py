"""The files that reading and writing a checkpoint keep open: a few, whatever the number of ranks, and none for ever."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from each_row import each_row
from torch import Tensor

from flatparam_core import Span
from flatparam_files.checkpoint.reader import open_checkpoint
from flatparam_files.checkpoint.soundness import verify_checkpoint
from flatparam_files.checkpoint.writer import CheckpointWriter
from flatparam_files.disk.source import TensorInfo
from flatparam_files.disk.system import OPEN_FILES
from flatparam_files.formats.detect import open_source, verify_source

RANKS = 9
TENSORS = {f"model/{name}": torch.arange(40.0) + number for number, name in enumerate("abc")}


def write(directory: Path) -> int:
    """A checkpoint of `TENSORS` by `RANKS` ranks; returns the most descriptors that were open at once."""
    most = 0

    def chunks(tensor: Tensor) -> Iterator[Tensor]:
        nonlocal most
        for part in tensor.split(7):
            most = max(most, descriptors(directory))
            yield part

    infos = {path: TensorInfo(tensor.shape, tensor.dtype) for path, tensor in TENSORS.items()}
    with CheckpointWriter(directory, infos, {}, world_size=RANKS) as writer:
        for path, tensor in TENSORS.items():
            writer.write(path, chunks(tensor))
        writer.commit()
    return most


def descriptors(directory: Path) -> int:
    """The number of files in the directory that this process has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        # That of the list itself is closed by now.
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{directory}/")
    return found


@each_row("limit", [1, 3, RANKS, RANKS + 1])
def test_few_files_are_open_at_once(tmp_path: Path, limit: int) -> None:
    """Of many ranks' files at most `state.open_files` are open, and bytes and counts are those without a limit."""
    with OPEN_FILES.set_to(limit):
        opened = write(tmp_path)
        # The lock of the directory is the other one.
        assert opened <= 1 + (RANKS if limit >= RANKS else 0)
        with open_checkpoint(tmp_path) as reader:
            for _ in range(2):
                for path, tensor in TENSORS.items():
                    assert torch.equal(reader.load(path), tensor)
                    assert descriptors(tmp_path) <= min(limit, RANKS)
            read = reader.nbytes_read
        with OPEN_FILES.set_to(RANKS), open_checkpoint(tmp_path) as unlimited:
            for _ in range(2):
                for path in TENSORS:
                    unlimited.load(path)
            assert read == unlimited.nbytes_read
        assert verify_checkpoint(tmp_path).is_sound
    assert descriptors(tmp_path) == 0


def test_two_tensors_are_read_in_turn(tmp_path: Path) -> None:
    """Readings that alternate between files get their bytes, though each closes the file of the other."""
    write(tmp_path)
    with OPEN_FILES.set_to(1), open_checkpoint(tmp_path) as reader:
        readings = [reader.read(path, Span(0, 40)) for path in TENSORS]
        parts = [list(part) for part in zip(*readings, strict=True)]
        for number, tensor in enumerate(TENSORS.values()):
            assert torch.equal(torch.cat([part[number] for part in parts]), tensor)


def test_nothing_stays_open(tmp_path: Path) -> None:
    """Files that nobody has closed are closed once nobody can read them any more."""
    write(tmp_path)
    for _ in range(3):
        source = open_source(tmp_path)
        assert sum(part.numel() for part in source.read("model/a", Span(0, 40))) == 40
        assert not verify_source(source).problems
        open_checkpoint(tmp_path).load("model/b")
        del source
        assert descriptors(tmp_path) == 0


def test_a_tensor_too_many(tmp_path: Path) -> None:
    """A tensor out of turn, or one after the last, is refused by name; the tensor whose turn it is can be written then."""
    infos = {path: TensorInfo(tensor.shape, tensor.dtype) for path, tensor in TENSORS.items()}
    with CheckpointWriter(tmp_path, infos, {}) as writer:
        with pytest.raises(ValueError, match="expected tensor 'model/a', found 'model/b'"):
            writer.write("model/b", [TENSORS["model/b"]])
        for path, tensor in TENSORS.items():
            writer.write(path, [tensor])
        with pytest.raises(ValueError, match="expected no further tensor, found 'model/a'"):
            writer.write("model/a", [TENSORS["model/a"]])
        writer.commit()
    assert verify_checkpoint(tmp_path).is_sound
