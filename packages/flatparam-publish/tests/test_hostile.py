"""Whatever lies in the folder of a mailbox, `receive` and `publish` return soon, with a `PublishError` or a version."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor

from flatparam_comm import SingleCollectives
from flatparam_files.checkpoint.fields import seal, unseal
from flatparam_publish import Mailbox, Publisher, PublishError, Receiver

from .beneath import mlp, shard
from .sample import assert_equal, change, expected


def publisher(folder: Path, **options: Any) -> Publisher:
    return Publisher(shard(mlp(), SingleCollectives()), Mailbox(folder, **options))


def published(folder: Path) -> Publisher:
    """A folder with a base and a change, and its publisher."""
    one = publisher(folder)
    one.publish()
    change(one._model, 1)
    one.publish()
    return one


def manifest_of(folder: Path) -> Path:
    return folder / "latest.json"


def catalogue_of(folder: Path) -> Path:
    return next(folder.glob("*-catalogue.flatparam"))


def packet_of(folder: Path) -> Path:
    return max(set(folder.glob("*.flatparam")) - {catalogue_of(folder)}, key=lambda path: path.stat().st_size)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def directory(path: Path) -> None:
    path.mkdir()


def sparse(path: Path) -> None:
    """A gigabyte that takes no room."""
    with path.open("wb") as file:
        file.truncate(2**30)


def nothing(path: Path) -> None:
    """The file is gone."""


@pytest.mark.parametrize("make", [fifo, endless, circle, directory, sparse, nothing], ids=lambda make: make.__name__)
@pytest.mark.parametrize("which", [manifest_of, catalogue_of, packet_of], ids=lambda which: which.__name__)
def test_irregular_files(which: Callable[[Path], Path], make: Callable[[Path], None], tmp_path: Path) -> None:
    """In the place of each file: an error of the receiver, which keeps its version; the publisher replaces it."""
    one = published(tmp_path)
    received: dict[str, Tensor] = {}
    receiver = Receiver(received, Mailbox(tmp_path))
    path = which(tmp_path)
    path.unlink()
    make(path)
    if which is manifest_of and make is nothing:
        assert not receiver.receive()
    else:
        with pytest.raises(PublishError):
            receiver.receive()
    assert not received
    if make is directory and which is manifest_of:
        path.rmdir()
    elif make is directory:
        return
    one._last = None  # as after a restart
    one.publish()
    assert Receiver(received, Mailbox(tmp_path)).receive()
    assert_equal(received, expected(one._model))


@each_row("make", [fifo, endless, circle], ids=lambda make: make.__name__)
def test_something_in_the_way_of_the_publisher(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Where it writes the next manifest lies a FIFO, a device or a link: it is replaced, and nothing else is written to."""
    one = published(tmp_path)
    make(tmp_path / "latest.json.new.flatparam")
    change(one._model, 2)
    one.publish()
    received: dict[str, Tensor] = {}
    assert Receiver(received, Mailbox(tmp_path)).receive()
    assert_equal(received, expected(one._model))


def test_a_link_in_the_way_of_the_publisher(tmp_path: Path) -> None:
    """A link to a file of the user's at that place is removed, and the file is as it was."""
    other = tmp_path / "other"
    other.write_text("mine")
    one = published(tmp_path / "box")
    (tmp_path / "box" / "latest.json.new.flatparam").symlink_to(other)
    one.publish()
    assert other.read_text() == "mine"


def rewritten(folder: Path, edit: Callable[[Any], None]) -> None:
    """The manifest with something changed, and the right hash."""
    path = manifest_of(folder)
    tree = unseal(path.read_bytes())
    edit(tree)
    path.write_bytes(seal(tree))


def without_packets(tree: Any) -> None:
    tree["base"]["packets"], tree["deltas"] = [], []


def with_empty_packets(tree: Any) -> None:
    tree["base"]["packets"], tree["deltas"] = [[[0, "", ""]]], []


def twice(tree: Any) -> None:
    tree["base"]["packets"] *= 2
    del tree["base"]["packets"][0][0][2:]


def no_parts(tree: Any) -> None:
    tree["base"]["packets"] = [[]]


def outside(tree: Any) -> None:
    tree["base"]["packets"][0][0][2] = "../other"


def begun_with_changes(tree: Any) -> None:
    tree["base"] = tree["deltas"][0]


def other_cuts(tree: Any) -> None:
    tree["cuts"] = []


@each_row(
    "edit",
    [without_packets, with_empty_packets, twice, no_parts, outside, begun_with_changes, other_cuts],
    ids=lambda edit: edit.__name__,
)
def test_manifests_that_lie(edit: Callable[[Any], None], tmp_path: Path) -> None:
    """With a right hash, too: refused, and the target is as it was."""
    published(tmp_path)
    rewritten(tmp_path, edit)
    received = {"before": torch.ones(1)}
    with pytest.raises(PublishError):
        Receiver(received, Mailbox(tmp_path)).receive()
    assert list(received) == ["before"]


def test_packets_that_leave_something_out(tmp_path: Path) -> None:
    """As many bytes as the tensors have, but the same record again and again: it is not taken for all values."""
    publisher(tmp_path).publish()
    path = packet_of(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data + data)

    def edit(tree: Any) -> None:
        packet = tree["base"]["packets"][0][0]
        packet[:2] = [2 * len(data), hashlib.sha256(data + data).hexdigest()]

    rewritten(tmp_path, edit)
    received: dict[str, Tensor] = {}
    with pytest.raises(PublishError, match="does not have all values of"):
        Receiver(received, Mailbox(tmp_path)).receive()
    assert not received


ODD = [None, True, -1, 2**70, 1.5, "", "a", "..", [], [[]], {}, [None], {"a": 1}]


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree of JSON."""
    items = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    return [at, *(place for key, value in items for place in places(value, (*at, key)))]


def test_any_value_in_any_place(tmp_path: Path) -> None:
    """Each value of the manifest, and of the list of tensors, replaced by odd ones: a `PublishError`, or all is as it was."""
    published(tmp_path)
    manifest, catalogue = manifest_of(tmp_path), catalogue_of(tmp_path)
    before, listed = unseal(manifest.read_bytes()), json.loads(catalogue.read_bytes())
    generator = random.Random(1)
    for root, is_list in ((before, False), (listed, True)):
        for place in places(root)[1:]:
            for odd in generator.sample(ODD, 4):
                changed = copy.deepcopy(root)
                parent = changed
                for key in place[:-1]:
                    parent = parent[key]
                parent[place[-1]] = odd
                tree = copy.deepcopy(before) if is_list else changed
                if is_list:
                    data = json.dumps(changed).encode()
                    catalogue.write_bytes(data)
                    tree["catalogue"][1] = hashlib.sha256(data).hexdigest()
                manifest.write_bytes(seal(tree))
                try:
                    Receiver({}, Mailbox(tmp_path)).receive()
                except PublishError:
                    continue
        catalogue.write_bytes(json.dumps(listed, separators=(",", ":")).encode())


def test_changed_packets(tmp_path: Path) -> None:
    """Bytes of packets changed, with a right digest: a `PublishError`, or other values; nothing else."""
    one = publisher(tmp_path)
    one.publish()
    change(one._model, 1)
    one.publish()
    generator = random.Random(2)
    manifest = manifest_of(tmp_path)
    before = unseal(manifest.read_bytes())
    for step in ("base", "delta"):
        packet = before["base"]["packets"][0][0] if step == "base" else before["deltas"][0]["packets"][0][0]
        path = tmp_path / packet[2]
        data = path.read_bytes()
        for _ in range(300):
            changed = bytearray(data)
            for _ in range(generator.choice((1, 1, 4))):
                changed[generator.randrange(min(len(changed), generator.choice((40, len(changed)))))] = (
                    generator.randrange(256)
                )
            path.write_bytes(changed)
            tree = copy.deepcopy(before)
            target = tree["base"] if step == "base" else tree["deltas"][0]
            target["packets"][0][0][1] = hashlib.sha256(changed).hexdigest()
            manifest.write_bytes(seal(tree))
            try:
                Receiver({}, Mailbox(tmp_path)).receive()
            except PublishError:
                continue
        path.write_bytes(data)


def test_a_private_folder(tmp_path: Path) -> None:
    """Nobody but its owner can enter the folder, or read a file in it; so it is with one that is private already."""
    (tmp_path / "own").mkdir(mode=0o700)
    for name, options in (("box", {"private": True}), ("own", {})):
        publisher(tmp_path / name, **options).publish()
        for path in (tmp_path / name, *(tmp_path / name).iterdir()):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    (tmp_path / "open").mkdir(mode=0o755)
    publisher(tmp_path / "open", private=True).publish()
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700
