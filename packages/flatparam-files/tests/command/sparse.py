"""Checkpoints of many gigabytes that take no disk: all their tensors are zero, and their files are holes."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

from flatparam_core import Span
from flatparam_files.checkpoint.commit import Committer
from flatparam_files.checkpoint.directory import CheckpointDirectory
from flatparam_files.checkpoint.manifest import (
    BLOCK_NBYTES,
    FilePiece,
    FileRecord,
    TensorRecord,
    block_count,
    rank_file,
)
from flatparam_files.checkpoint.rank_part import RankReport
from flatparam_files.checkpoint.values import encode
from flatparam_files.disk.safetensors import encode_header
from flatparam_files.disk.source import TensorInfo


def infos(count: int, shape: tuple[int, ...]) -> dict[str, TensorInfo]:
    """`count` weights of `shape`."""
    return {f"layers.{index}.weight": TensorInfo(shape, torch.float32) for index in range(count)}


def sparse_safetensors(path: Path, tensors: dict[str, TensorInfo]) -> None:
    """A safetensors file of zeros."""
    header = encode_header(tensors)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(info.nbytes for info in tensors.values()))


def sparse_run(path: Path, tensors: dict[str, TensorInfo], world_size: int) -> None:
    """A checkpoint of ours of zeros, as step 0 of `world_size` ranks."""
    committer = Committer(CheckpointDirectory(path))
    ticket = committer.prepare(0)
    for rank in range(world_size):
        report = _rank(ticket.temporary, ticket.save_id, tensors, rank, world_size)
        report.write(ticket.temporary)
    committer.commit(ticket, world_size)
    committer.close()


def _rank(directory: Path, save_id: str, tensors: dict[str, TensorInfo], rank: int, world_size: int) -> RankReport:
    spans = {
        name: Span(info.numel * rank // world_size, info.numel * (rank + 1) // world_size)
        for name, info in tensors.items()
    }
    parts = {name: TensorInfo((span.numel,), torch.float32) for name, span in spans.items()}
    header = encode_header(parts)
    sparse_safetensors(directory / rank_file(rank), parts)
    records, at = {}, len(header)
    for name, span in spans.items():
        piece = FilePiece(rank, at, span, _hashes(parts[name].nbytes))
        records[f"model/{name}"] = TensorRecord(tensors[name], (piece,))
        at += parts[name].nbytes
    file = FileRecord(rank_file(rank), at, len(header), xxhash.xxh3_128_hexdigest(header))
    values = {"model": encode({}, ("model",), {})} if rank == 0 else {}
    return RankReport(save_id, rank, file, records, {}, {}, values)


def _hashes(nbytes: int) -> tuple[str, ...]:
    count = block_count(nbytes)
    last = nbytes - (count - 1) * BLOCK_NBYTES
    whole = xxhash.xxh3_128_hexdigest(bytes(BLOCK_NBYTES))
    return (*[whole] * (count - 1), xxhash.xxh3_128_hexdigest(bytes(last)))
