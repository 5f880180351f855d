"""The ranks that train together, and the two things they tell each other beside the model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which its default arguments would hold for ever
from attrs import frozen

from .errors import UserError


@frozen
class Ranks:
    """This rank among ``size``. With one rank nothing is sent."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks in float64. A collective."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's largest over the ranks. A collective."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(tensor, op=operation)
        reduced: list[float] = tensor.tolist()
        return reduced


@contextmanager
def joined(device_type: str, *, alone: bool) -> Iterator[Ranks]:
    """Join torchrun's ranks, or make a group of one; leave it at the end. ``alone`` makes no group at all."""
    if alone:
        yield Ranks(0, 1, _device(device_type, 0))
        return
    backend = "nccl" if device_type == "cuda" else "gloo"
    device = _device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not re-exported for type checkers
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
        dist.barrier()  # so that no rank takes its end of a connection away while another one still uses it
    finally:
        dist.destroy_process_group()


def _device(device_type: str, index: int) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() <= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1:
        raise UserError(f"--device cuda takes one GPU per rank, and there are {torch.cuda.device_count()}.")
    device = torch.device(device_type, index)
    torch.cuda.set_device(device)
    return device
