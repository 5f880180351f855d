"""The gradients of one unit on their way between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
from torch import Tensor
from typing_extensions import final

from flatparam_comm import COMPLETED, FlatParamHandle, Pending
from flatparam_runtime.phases import Phase

if TYPE_CHECKING:
    from flatparam_runtime.unit import Unit

__all__ = ["PartialSum", "Reduced", "Reduction"]


@final
@attrs.frozen(eq=False)
class Reduced:
    """The gradient of one flat parameter's shard, averaged, as `.grad` takes it."""

    handle: FlatParamHandle
    gradient: Tensor
    arrived: bytes
    """For each parameter, non-zero where this rank had a gradient."""


@final
@attrs.define(eq=False)
class PartialSum:
    """What was reduced inside the shard groups and not yet across them, in the reduction dtype."""

    gradient: Tensor
    arrived: bytes


@final
@attrs.define(eq=False)
class Reduction:
    """Owns the tensors until it is settled: the full gradients, and the shards of their sums that are being made."""

    unit: Unit
    parts: list[tuple[FlatParamHandle, Tensor, Pending]]

    @classmethod
    def begin(cls, unit: Unit, handles: Sequence[FlatParamHandle]) -> Reduction:
        """Start to sum the collected gradients of `handles` over the shard group."""
        parts = []
        for handle in handles:
            output, full = handle.begin_reduce()
            hook = unit.hooks.reduce
            if hook is None:
                pending = unit.plan.topology.shard.reduce_scatter(output, full, label=unit.name)
            else:
                hook(full, output)
                pending = COMPLETED
            parts.append((handle, output, pending))
        return cls(unit, parts)

    def settle(self) -> list[Reduced]:
        """Wait, free the unsharded gradients, sum over the copies of the shard, and average."""
        settled = []
        for handle, output, pending in self.parts:
            pending.wait()
            mine = bytes(handle.gradients.deposited)
            handle.gradients.release()
            arrived = self._replicate(handle, output, mine)
            if arrived is not None:
                settled.append(self._averaged(handle, output, arrived))
        if self.unit.instruments:
            self.unit.emit("finish", sum(handle.gradients.buffer.nbytes for handle, _, _ in self.parts))
        self.unit.move(Phase.IDLE)
        return settled

    def _replicate(self, handle: FlatParamHandle, output: Tensor, arrived: bytes) -> bytes | None:
        """Sum `output` over the copies of the shard; `None` where that is left to a later backward pass."""
        unit = self.unit
        replicate = unit.plan.topology.replicate
        if replicate is None:
            return arrived
        before = unit.partial.pop(handle, None)
        if before is not None:
            output += before.gradient
            arrived = bytes(a | b for a, b in zip(before.arrived, arrived, strict=True))
        if not unit.requires_all_reduce:
            unit.partial[handle] = PartialSum(output, arrived)
            return None
        if unit.hooks.all_reduce is not None:
            unit.hooks.all_reduce(output, output)
        elif unit.hooks.reduce is None or unit.plan.topology.shard.size > 1:
            replicate.all_reduce(output, label=unit.name).wait()
        return arrived

    def _averaged(self, handle: FlatParamHandle, output: Tensor, arrived: bytes) -> Reduced:
        _, after = self.unit.divisors
        if after != 1.0:
            output.div_(after)
        return Reduced(handle, handle.for_grad(output), arrived)
