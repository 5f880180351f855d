"""A tiny GPT that trains on the source of the standard library: the job that is put under load."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatparam import FullyShardedDataParallel
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from tools.gpt.corpus import read_corpus
from tools.gpt.model import GPT, Block
from tools.gpt.shape import Shape

__all__ = ["GLOBAL_ROWS", "Resources", "batches", "ddp", "resources", "sharded", "status_nbytes", "train"]

SHAPE: Final = Shape(layers=2, width=32, heads=2, context=32)
GLOBAL_ROWS: Final = 8
_TEXT_NBYTES: Final = 2**20


def _model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(SHAPE)


def sharded(collectives: Collectives, **arguments: Any) -> FullyShardedDataParallel:
    """The model, sharded over the ranks; each block is a unit."""
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        _model(), process_group=collectives, auto_wrap_policy=policy, use_orig_params=True, **arguments
    )


def ddp(collectives: Collectives) -> nn.Module:
    """The model in torch's DistributedDataParallel, over the default group."""
    return DistributedDataParallel(_model())


def batches(rank: int, size: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
    """The numbers of the steps and this rank's rows of each, which depend on the step alone."""
    text = torch.frombuffer(bytearray(read_corpus(None).text[:_TEXT_NBYTES]), dtype=torch.uint8).long()
    rows = GLOBAL_ROWS // size
    step = first
    while True:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - SHAPE.context - 1, (GLOBAL_ROWS,), generator=generator)
        mine = starts[rank * rows : (rank + 1) * rows]
        yield step, torch.stack([text[start : start + SHAPE.context + 1] for start in mine])
        step += 1


def train(
    collectives: Collectives,
    make: Callable[[Collectives], nn.Module],
    steps: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train for some steps; returns this rank's losses."""
    model = make(collectives)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for step, rows in batches(collectives.rank, collectives.size):
        if step == steps:
            break
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        on_step(step, losses[-1])
    return losses


class Resources(NamedTuple):
    """What this process holds, once its garbage is collected."""

    nbytes: int
    """Bytes that are allocated and not freed, and shared memory that is mapped.

    Not the resident bytes: how many pages an allocator keeps, and when, is up to the machine and its load.
    """

    objects: int
    """Objects of Python that can hold others and came into being after `gc.freeze()`."""

    files: int
    """Open files."""

    threads: int
    """Threads of Python."""


def status_nbytes(field: str) -> int:
    """Bytes that Linux tells of this process, for example `VmRSS` (resident now) or `VmHWM` (resident at most)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


class _Mallinfo2(ctypes.Structure):
    """The statistics of glibc's allocator: mallinfo2(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    )


def _allocated_nbytes() -> int:
    """Bytes that this process has from malloc, in all arenas and in mappings; without glibc, anonymous resident ones."""
    try:
        count = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return status_nbytes("RssAnon")
    count.restype = _Mallinfo2
    found = count()
    return int(found.uordblks + found.hblkhd)


def resources() -> Resources:
    """Collect garbage, and count what this process holds."""
    gc.collect()
    nbytes = _allocated_nbytes() + status_nbytes("RssShmem")
    return Resources(nbytes, len(gc.get_objects()), len(os.listdir("/proc/self/fd")), threading.active_count())
