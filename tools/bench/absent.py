"""A world of one real rank and others that are not there: what a step costs the host when collectives are free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from flatparam_clients.second_door.door import fully_shard
from flatparam_comm import (
    COMPLETED,
    Collectives,
    ForwardingCollectives,
    Pending,
    ProcessGroupCollectives,
    ReduceOp,
    SingleCollectives,
)

from .contenders import ddp, fsdp1, fsdp2, in_place, ours
from .training import Setting, Training, floor

PLAIN: Final = "plain"


class _FirstOf(ForwardingCollectives):
    """Rank 0 of `size`; the others are not there. Tensors stay as they are, but for the output of a reduction."""

    def __init__(self, size: int) -> None:
        """Say that there are `size` ranks."""
        super().__init__(SingleCollectives())
        self._size = size

    @property
    def size(self) -> int:
        """How many ranks there would be."""
        return self._size

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Nothing."""
        return COMPLETED

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Numbers, so that the optimizer does not compute with whatever was there."""
        output.fill_(1.0)
        return COMPLETED

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Nothing."""
        return COMPLETED

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """The same value from everybody."""
        return [value] * self._size

    def subgroup(self, ranks: Sequence[int]) -> Collectives | None:
        """Fewer ranks."""
        return _FirstOf(len(ranks)) if 0 in ranks else None

    def _decorate(self, inner: Collectives) -> Collectives:
        raise AssertionError("subgroup does not decorate")


@contextmanager
def world(size: int, backend: str = "fake") -> Iterator[Collectives]:
    """torch's default process group is one of `size` ranks; the same as `Collectives`. The "fake" one does nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=size)
    try:
        yield ProcessGroupCollectives()
    finally:
        dist.destroy_process_group()


def _ours_without_c10d(setting: Setting, **arguments: Any) -> Training:
    return ours(Setting(setting.workload, setting.bf16, _FirstOf(setting.group.size)), **arguments)


def _free_ddp(setting: Setting) -> Training:
    """torch's DistributedDataParallel; gradients are said to be reduced, as the process group has no futures for it."""
    training = ddp(setting)
    model: Any = training.model
    model.register_comm_hook(None, lambda state, bucket: _completed(bucket.buffer()))
    return training


def _completed(value: Tensor) -> torch.futures.Future[Tensor]:
    devices: list[int | str | torch.device] = [] if value.device.type == "cpu" else [value.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(value)
    return future


CONTENDERS: Final[dict[str, Callable[[Setting], Training]]] = {
    PLAIN: floor,
    "flatparam": ours,
    "flatparam, original": partial(ours, use_orig_params=True),
    "flatparam, fully_shard": in_place,
    "flatparam, DTensors": partial(fsdp2, shard=fully_shard),
    "flatparam without c10d": _ours_without_c10d,
    "flatparam without c10d, original": partial(_ours_without_c10d, use_orig_params=True),
    "torch FSDP1": fsdp1,
    "torch FSDP1, original": partial(fsdp1, use_orig_params=True),
    "torch FSDP2": fsdp2,
    "torch DDP, no reductions": _free_ddp,
}
