"""A checkpoint as one rank saves it, without the rank; and work in a child."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flatparam_core import Span
from flatparam_files import Staging
from flatparam_files.checkpoint import (
    CheckpointDirectory,
    Committer,
    Contribution,
    RankValue,
    inline,
    write_part,
)


def save(root: Path, step: int, extra: Any = None) -> Path:
    """Save a small model and its AdamW, whose counters are in the manifest itself."""
    weights = {"weight": torch.randn(3, 5), "bias": torch.randn(3)}
    names = ("exp_avg", "exp_avg_sq")
    states = {fqn: {name: torch.rand_like(weight) for name in names} for fqn, weight in weights.items()}
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "params": list(weights)}]
    contribution = Contribution()
    contribution.add_values(("model",), weights)
    contribution.add_values(("optimizer",), {"state": states, "param_groups": groups})
    for fqn, weight in weights.items():
        value = RankValue(0, Span(0, weight.numel()), inline(torch.tensor(1.0)))
        contribution.rank_values[f"optimizer/state/{fqn}/step"] = value
    contribution.add_values(("extra",), extra)
    committer = Committer(CheckpointDirectory(root))
    ticket = committer.prepare(step)
    write_part(ticket, 0, 1, contribution, staging=Staging())
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
