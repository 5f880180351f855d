"""The records of a manifest refuse to be built wrong, and one loop verifies checkpoints of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from each_row import each_row

from flatparam_core import Span
from flatparam_files.checkpoint.manifest import FilePiece, FileRecord, Manifest, RankValue, TensorRecord
from flatparam_files.checkpoint.soundness import verify_checkpoint
from flatparam_files.checkpoint.writer import CheckpointWriter
from flatparam_files.disk.source import TensorInfo
from flatparam_files.formats.detect import open_source, verify_source

HASH = "0" * 32
PIECE = FilePiece(0, 100, Span(0, 4), (HASH,))
FLAT = TensorInfo((4,), torch.float32)
RECORD = TensorRecord(FLAT, (PIECE,))
FILE = FileRecord("rank-00000.safetensors", 200, 80, HASH)
MANIFEST = Manifest(HASH, 3, None, (FILE,), {"model/a": RECORD}, {}, {"model/b": "model/a"}, {}, {})

BAD: list[tuple[Any, dict[str, Any], str]] = [
    (PIECE, {"file": -1}, r"FilePiece.file: .*'-1'"),
    (PIECE, {"offset": 1.5}, r"FilePiece.offset: .*'1.5'"),
    (PIECE, {"span": (0, 4)}, r"FilePiece.span: expected a Span, found '\(0, 4\)'"),
    (PIECE, {"hashes": ("zz",)}, "FilePiece.hashes: expected 32 hexadecimal digits, found 'zz'"),
    (RECORD, {"info": TensorInfo((-4,), torch.float32), "pieces": ()}, "TensorRecord.info: .*'-4'"),
    (RECORD, {"pieces": (PIECE, PIECE)}, "TensorRecord.pieces: .*occur twice or not at all"),
    (RECORD, {"pieces": (attrs.evolve(PIECE, hashes=()),)}, "TensorRecord.pieces: expected 1 hashes .*'0'"),
    (RECORD, {"stride": (2,)}, r"TensorRecord.stride: .*densely, found '\(2,\)'"),
    (RECORD, {"stride": (1, 1)}, r"TensorRecord.stride: expected a stride for each dimension"),
    (RECORD, {"whole": 1}, "TensorRecord.whole: expected a bool, found '1'"),
    (RECORD, {"inline": bytes(16)}, "TensorRecord.inline: expected 16 bytes inline and no pieces"),
    (RECORD, {"inline": bytes(3), "pieces": ()}, "TensorRecord.inline: expected 16 bytes inline"),
    (RankValue(0, Span(0, 4), None), {"rank": "0"}, "RankValue.rank: "),
    (RankValue(0, Span(0, 4), None), {"span": None}, "RankValue.span: "),
    (
        RankValue(0, Span(0, 4), None),
        {"value": [{"a": (1,)}]},
        r"RankValue.value: expected what JSON can say, found '\(1,\)'",
    ),
    (
        MANIFEST,
        {"values": {"a": [1, 2.5, None, {"b": b"x"}]}},
        "Manifest.values: expected what JSON can say, found \"b'x'\"",
    ),
    (MANIFEST, {"values": {1: "a"}}, "Manifest.values: expected a string, found '1'"),
    (FILE, {"name": "../../rank-00000.safetensors"}, "FileRecord.name: "),
    (FILE, {"nbytes": True}, "FileRecord.nbytes: "),
    (FILE, {"header_nbytes": 201}, "FileRecord.header_nbytes: .*of 200 bytes, found '201'"),
    (FILE, {"header_hash": "0"}, "FileRecord.header_hash: "),
    (MANIFEST, {"save_id": "3"}, "Manifest.save_id: .*found '3'"),
    (MANIFEST, {"step": -3}, "Manifest.step: .*found '-3'"),
    (MANIFEST, {"follows": 3}, "Manifest.follows: .*found '3'"),
    (MANIFEST, {"files": ()}, "Manifest.files: expected a file of each rank"),
    (MANIFEST, {"files": (FILE, FILE)}, "Manifest.files: expected a file of each rank"),
    (MANIFEST, {"tensors": {"model/a": PIECE}}, "Manifest.tensors: expected a TensorRecord"),
    (MANIFEST, {"tensors": {"model/a": attrs.evolve(RECORD, pieces=())}}, "'model/a' lacks the elements"),
    (
        MANIFEST,
        {"tensors": {"model/a": attrs.evolve(RECORD, pieces=(attrs.evolve(PIECE, file=1),))}},
        "'model/a': expected the file 1 in the manifest, found none",
    ),
    (
        MANIFEST,
        {"tensors": {"model/a": attrs.evolve(RECORD, pieces=(attrs.evolve(PIECE, offset=190),))}},
        r"'model/a': bytes \[190, 206\) are not in rank-00000.safetensors of 200 bytes",
    ),
    (MANIFEST, {"per_rank": {"x": (PIECE,)}}, "Manifest.per_rank: expected a RankValue"),
    (
        MANIFEST,
        {"aliases": {"model/b": "model/c"}},
        "Manifest.aliases: .*'model/b' stands for, found 'model/c'",
    ),
    (MANIFEST, {"written_by": {"torch": 2}}, "Manifest.written_by: expected a string, found '2'"),
]


@each_row(
    ("record", "changes", "message"),
    BAD,
    ids=[f"{type(record).__name__} {message}" for record, _, message in BAD],
)
def test_bad_values(record: Any, changes: dict[str, Any], message: str) -> None:
    """A record with a bad value is not built, whoever builds it: the error names the field and the value."""
    with pytest.raises(ValueError, match=message):
        attrs.evolve(record, **changes)


def test_what_is_built_can_be_read() -> None:
    """A record that could be built comes back from its JSON as it was."""
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_both_ways_to_verify_agree(tmp_path: Path) -> None:
    """`verify_checkpoint` and `verify_source` list the same problems of a checkpoint, in the same order."""
    infos = {f"model/{name}": TensorInfo((1000,), torch.float32) for name in "abc"}
    with CheckpointWriter(tmp_path, infos, {}, world_size=3) as writer:
        for path in infos:
            writer.write(path, [torch.ones(1000)])
        where = writer.commit()
    assert verify_checkpoint(tmp_path).problems == verify_source(open_source(tmp_path)).problems == ()
    data = bytearray((where / "rank-00001.safetensors").read_bytes())
    data[-1] ^= 1
    (where / "rank-00001.safetensors").write_bytes(data)
    (where / "rank-00002.safetensors").unlink()
    seen: list[int] = []
    found = verify_source(open_source(tmp_path), seen.append)
    assert verify_checkpoint(tmp_path).problems == found.problems
    assert len(found.problems) == 1
    assert found.unproven_nbytes == 0
    assert found.nbytes == sum(seen)
