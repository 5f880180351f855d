"""Sums of values that each rank multiplies first, in one call."""

from __future__ import annotations

from typing import final

import attrs
import torch
from torch import Tensor

from flatparam_comm.collectives import Collectives, Pending
from flatparam_comm.process_group.engine import ProcessGroupCollectives

__all__ = ["Scaled", "premultiplies", "scaled"]


def premultiplies(collectives: Collectives, device: torch.device) -> bool:
    """Whether `scaled` can sum tensors on `device`: NCCL can, if nothing decorates it."""
    return isinstance(collectives, ProcessGroupCollectives) and collectives.premultiplies(device)


def scaled(collectives: Collectives, device: torch.device, factor: float) -> Scaled:
    """The sums of `collectives`, of tensors on `device` that each rank multiplies by `factor` first, in the same call.

    Raises:
        ValueError: if `premultiplies` returns False.
    """
    if not isinstance(collectives, ProcessGroupCollectives):
        raise ValueError(
            f"expected collectives that multiply before they sum, found {collectives!r}; multiply first, and use their "
            "own sums"
        )
    collectives.check_factor(device, factor)
    return Scaled(collectives, factor)


@final
@attrs.frozen
class Scaled:
    """Sums over ranks of values that are multiplied by `factor` first (PREMUL_SUM)."""

    collectives: ProcessGroupCollectives
    factor: float

    def reduce_scatter(self, output: Tensor, full: Tensor, *, label: str = "") -> Pending:
        """See `Collectives.reduce_scatter`."""
        return self.collectives.reduce_scatter(output, full, label=label, factor=self.factor)

    def all_reduce(self, tensor: Tensor, *, label: str = "") -> Pending:
        """See `Collectives.all_reduce`."""
        return self.collectives.all_reduce(tensor, label=label, factor=self.factor)
