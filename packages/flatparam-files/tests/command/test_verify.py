"""`flatparam ckpt verify`."""

import errno
import os
from pathlib import Path

import pytest
import torch

from .calling import Caller, tree


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["run", "a.pt", "dcp", "hf"])
def test_sound(name: str, flatparam: Caller) -> None:
    """A sound checkpoint is said to be what was written, or to have no checksums, with the status 0."""
    flatparam("export", "@run", "@dcp", "--to", "dcp")
    flatparam("export", "@run", "@hf", "--to", "hf")
    found = flatparam("verify", f"@{name}")
    assert (found.status, found.err) == (0, "")
    assert ("no checksums" if name == "hf" else "are what was written") in found.out
    assert flatparam("verify", f"@{name}", "--quiet").out == ""


def test_damaged(flatparam: Caller) -> None:
    """A changed bit in any file of a checkpoint of ours is named with the file, with the status 1."""
    for file in sorted((flatparam.directory / "run" / "step-00000004").iterdir()):
        size = file.stat().st_size
        for at in (0, size // 2, size - 1):
            _flip(file, at)
            found = flatparam("verify", "@run/step-00000004")
            assert (found.status, found.out) == (1, ""), (file.name, at)
            assert file.name in found.err
            _flip(file, at)
    assert flatparam("verify", "@run").status == 0


def test_damaged_run(flatparam: Caller) -> None:
    """If the newest checkpoint of a run is damaged, that is said once, and of what the others read instead."""
    flatparam("reshard", "@run", "@run", "--step", "9", "--world-size", "1")
    _flip(flatparam.directory / "run" / "step-00000009" / "manifest.json", 300)
    found = flatparam("verify", "@run")
    assert (found.status, found.out) == (1, "")
    assert found.err.count("step-00000009/manifest.json: damaged") == 1
    for arguments in (("inspect", "@run"), ("export", "@run", "@out.pt", "--to", "torch")):
        found = flatparam(*arguments)
        assert found.status == 0
        assert found.err.startswith("flatparam: warning: ")
        assert "step-00000004, is used instead" in found.err


def test_damaged_foreign(flatparam: Caller) -> None:
    """So it is in a file of torch.save, where it has a checksum, and where the pickle is broken."""
    data = (flatparam.directory / "a.pt").read_bytes()
    weight = bytes(tree()["model"]["head.weight"][0].view(torch.uint8).tolist())
    for at in (data.index(b"data.pkl") + 100, data.index(weight)):
        _flip(flatparam.directory / "a.pt", at)
        found = flatparam("verify", "@a.pt")
        assert (found.status, found.out) == (1, ""), at
        assert "a.pt" in found.err
        _flip(flatparam.directory / "a.pt", at)
    assert flatparam("verify", "@a.pt").status == 0


def test_nothing_to_verify(flatparam: Caller) -> None:
    """A path with no checkpoint is no damaged one: the status is 2."""
    assert flatparam("verify", "@gone").status == 2
    assert flatparam("verify").status == 2


def test_a_manifest_stands_for_its_checkpoint(flatparam: Caller) -> None:
    """The path of a manifest is that of the directory around it."""
    (manifest,) = flatparam.directory.glob("run/**/manifest.json")
    assert flatparam("verify", manifest) == flatparam("verify", manifest.parent)


def test_a_part_cannot_be_verified(flatparam: Caller) -> None:
    """A checkpoint is verified as a whole, so --only is refused rather than ignored."""
    assert flatparam("verify", "@run", "--only", "model").status == 2


def test_an_unreadable_file_is_not_damaged(flatparam: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk fails to read a file, the file may be sound, and the status is 2; it is 1 if another one is damaged."""
    shards = sorted((flatparam.directory / "run" / "step-00000004").glob("*.safetensors"))
    assert len(shards) > 1
    unread = os.stat(shards[0]).st_ino
    preadv = os.preadv

    def failing(descriptor: int, views: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_ino == unread:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", failing)
    found = flatparam("verify", "@run")
    assert (found.status, found.out) == (2, "")
    assert f"{shards[0].name}: cannot be read at offset" in found.err
    _flip(shards[1], 20)
    found = flatparam("verify", "@run")
    assert (found.status, found.out) == (1, "")
    assert shards[0].name in found.err
    assert shards[1].name in found.err
