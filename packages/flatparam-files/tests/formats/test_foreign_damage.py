"""Damaged files of other programs: a typed error or the right numbers, and never anything else."""

import random
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from each_row import each_row

from flatparam_files import open_source, write_hugging_face
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.source import Source

from .samples import contents, plain, same, state

TRIALS = 150


def _torch(path: Path) -> Path:
    torch.save(state(), path)
    return path


def _dcp(path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), checkpoint_id=path, no_dist=True)
    return path


def _hugging_face(path: Path) -> Path:
    torch.save(state()["model"], path.with_suffix(".pt"))
    write_hugging_face(open_source(path.with_suffix(".pt")), path, max_shard_nbytes=100)
    return path


MAKE = {"torch": _torch, "dcp": _dcp, "safetensors": _hugging_face}


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.iterdir())


def _everything(path: Path) -> tuple[dict[str, torch.Tensor], object] | None:
    """All that is in it; None where that is refused."""
    try:
        source: Source = open_source(path)
        return contents(source), plain(source.values)
    except CheckpointError as error:
        assert str(error)
        return None


def _damaged(path: Path, directory: Path, change: Callable[[bytearray], bytearray | None], which: int) -> Path:
    copy = directory / path.name
    if copy.is_dir():
        shutil.rmtree(copy)
    shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
    file = _files(copy)[which % len(_files(copy))]
    data = bytearray(file.read_bytes())
    file.write_bytes(change(data) or data)
    return copy


@each_row("name", MAKE)
def test_truncation(name: str, tmp_path: Path) -> None:
    """A file that ends anywhere before its end is refused."""
    path = MAKE[name](tmp_path / "it")
    (tmp_path / "copies").mkdir()
    for which, file in enumerate(_files(path)):
        nbytes = file.stat().st_size
        for part in range(16):
            cut = nbytes * part // 16 if part else nbytes - 2
            copy = _damaged(path, tmp_path / "copies", lambda data, cut=cut: data[:cut] or bytearray(b"x"), which)  # type: ignore[misc]
            assert _everything(copy) is None, (file.name, cut)


@each_row("name", ["torch", "dcp"])
def test_flipped_bits(name: str, tmp_path: Path) -> None:
    """A flipped bit anywhere is refused, or is where no number is: the tensors are never other ones."""
    path = MAKE[name](tmp_path / "it")
    expected = _everything(path)
    assert expected is not None
    (tmp_path / "copies").mkdir()
    choose = random.Random(0)
    refused = 0
    for trial in range(TRIALS):

        def flip(data: bytearray) -> None:
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)

        found = _everything(_damaged(path, tmp_path / "copies", flip, trial))
        if found is None:
            refused += 1
        elif found[0].keys() == expected[0].keys():
            assert all(same(tensor, expected[0][key]) for key, tensor in found[0].items())
    assert refused > TRIALS // 4


@each_row("name", MAKE)
def test_overwritten_pieces(name: str, tmp_path: Path) -> None:
    """Random bytes over a piece of a file end in a typed error or in a checkpoint, and in nothing else."""
    path = MAKE[name](tmp_path / "it")
    (tmp_path / "copies").mkdir()
    choose = random.Random(1)
    for trial in range(TRIALS):

        def overwrite(data: bytearray) -> None:
            at = choose.randrange(len(data))
            piece = choose.randbytes(choose.randrange(1, 40))
            data[at : at + len(piece)] = piece

        _everything(_damaged(path, tmp_path / "copies", overwrite, trial))


def test_pickles_that_no_checksum_protects(tmp_path: Path) -> None:
    """Flipped bits in the pickle of an archive whose checksums are right end in a typed error or in a checkpoint."""
    path = _torch(tmp_path / "it.pt")
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in records if name.endswith("data.pkl"))
    choose = random.Random(2)
    refused = 0
    for _ in range(3 * TRIALS):
        data = bytearray(records[pickled])
        for _ in range(choose.randrange(1, 4)):
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        with zipfile.ZipFile(tmp_path / "copy.pt", "w") as archive:
            for name, content in records.items():
                archive.writestr(name, bytes(data) if name == pickled else content)
        refused += _opened(tmp_path / "copy.pt") is None
    assert refused > TRIALS


def _opened(path: Path) -> Source | None:
    try:
        return open_source(path)
    except CheckpointError as error:
        assert path.name in str(error)
        return None
