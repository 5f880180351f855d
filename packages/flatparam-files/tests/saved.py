"""A checkpoint as one rank saves it, without the rank; and work in a child."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatparam_core import Span
from flatparam_files import Staging, TensorInfo
from flatparam_files.checkpoint.commit import Committer
from flatparam_files.checkpoint.directory import CheckpointDirectory
from flatparam_files.checkpoint.manifest import RankValue, TensorRecord
from flatparam_files.checkpoint.rank_part import RankFileWriter, RankReport
from flatparam_files.checkpoint.values import encode, inline


def save(root: Path, step: int, extra: Any = None) -> Path:
    """Save a small model and its AdamW, whose counters are in the manifest itself."""
    weights = {"weight": torch.randn(3, 5), "bias": torch.randn(3)}
    names = ("exp_avg", "exp_avg_sq")
    states = {fqn: {name: torch.rand_like(weight) for name in names} for fqn, weight in weights.items()}
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "params": list(weights)}]
    tensors: dict[str, Tensor] = {}
    optimizer = {"state": states, "param_groups": groups}
    parts = {"model": weights, "optimizer": optimizer, "extra": extra}
    values = {part: encode(value, (part,), tensors) for part, value in parts.items()}
    step_of = {fqn: RankValue(0, Span(0, each.numel()), inline(torch.tensor(1.0))) for fqn, each in weights.items()}
    committer = Committer(CheckpointDirectory(root))
    ticket = committer.prepare(step)
    pieces = [
        (path, TensorRecord(TensorInfo(each.shape, each.dtype)), Span(0, each.numel()))
        for path, each in tensors.items()
    ]
    writer = RankFileWriter(ticket, 0, 1, pieces, staging=Staging())
    for each in filter(Tensor.numel, tensors.values()):
        writer.write([each])
    rank_values = {f"optimizer/state/{fqn}/step": value for fqn, value in step_of.items()}
    report = RankReport(ticket.save_id, 0, writer.finish(), writer.records, rank_values, {}, values)
    report.write(ticket.temporary)
    path = committer.commit(ticket, 1)
    committer.close()
    return path


def fork(work: Callable[[], None]) -> int:
    """Do `work` in a child; returns its process id. The child's exit code is 1 where it raises."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def end_of(pid: int) -> int:
    """The exit code of a child that ends: negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
