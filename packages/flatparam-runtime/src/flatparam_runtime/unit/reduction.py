"""The gradients of one unit on their way between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs
from torch import Tensor
from typing_extensions import final

from flatparam_comm import COMPLETED, FlatParamHandle, Pending, Threshold, takes_parts
from flatparam_runtime.streams import Mark, streams_of
from flatparam_runtime.unit.phases import Phase

if TYPE_CHECKING:
    from flatparam_runtime.unit.unit import Unit

__all__ = ["PART_NBYTES", "PartialSum", "Reduced", "Reduction"]

PART_NBYTES: Final = Threshold(
    "runtime.part_nbytes",
    2**14,
    "Through shared memory a unit's gradients are reduced from where autograd left them if one has so many bytes on "
    "average; smaller ones are copied to a flat buffer first.",
    least=0,
)
"""Below it a tensor costs more to cut out than its second copy."""


@final
@attrs.define(eq=False)
class Reduced:
    """The gradient of one flat parameter's shard, averaged, as `.grad` takes it."""

    handle: FlatParamHandle
    gradient: Tensor
    arrived: bytes
    """For each parameter, non-zero where this rank had a gradient."""
    landed: Mark | None = None
    """When the gradient is in the host's memory, where it is still being copied there."""
    source: Tensor | None = None
    """What it is copied from."""

    def let_go(self) -> None:
        """Free what it is copied from, for whatever the current stream does after the copy."""
        if self.landed is not None and self.source is not None:
            self.landed.wait()
            self.source = None


@final
@attrs.define(eq=False)
class PartialSum:
    """What was reduced inside the shard groups and not yet across them, in the reduction dtype."""

    gradient: Tensor
    arrived: bytes


@final
@attrs.define(eq=False)
class _Part:
    """The gradient of one flat parameter: what is under way, the shard of the sum that it fills, and who has given."""

    handle: FlatParamHandle
    output: Tensor
    pending: Pending
    arrived: bytes = b""


@final
@attrs.define(eq=False)
class Reduction:
    """Owns the tensors until it is settled: the full gradients, and the shards of their sums that are being made.

    There are two sums: over the ranks that a parameter is sharded over, and then over the copies of each shard, where
    there are any.
    """

    unit: Unit
    parts: list[_Part]

    @classmethod
    def begin(cls, unit: Unit, handles: Sequence[FlatParamHandle]) -> Reduction:
        """Start to sum the collected gradients of `handles` over the shard group."""
        parts = []
        shard = unit.summing if unit.plan.topology.shard.size > 1 else unit.plan.topology.shard
        hook, group = unit.hooks.reduce, unit.plan.topology.shard
        for handle in handles:
            pending: Pending = COMPLETED
            if unit.reduces_parts and takes_parts(group) and handle.gradients.is_apart:
                output, apart = handle.begin_reduce_parts()
                pending = group.reduce_scatter_parts(output, apart, label=unit.name)
            else:
                output, full = handle.begin_reduce()
                if hook is None:
                    pending = shard.reduce_scatter(output, full, label=unit.name)
                else:
                    hook(full, output)
            parts.append(_Part(handle, output, pending))
        return cls(unit, parts)

    def replicate(self) -> None:
        """Wait for the first sum, free the unsharded gradients, and start the second."""
        summed = []
        for part in self.parts:
            part.pending.wait()
            part.arrived = bytes(part.handle.gradients.deposited)
            part.handle.gradients.release()
            if self._begin_copies(part):
                summed.append(part)
        if self.unit.instruments:
            self.unit.emit("finish", sum(part.handle.gradients.buffer.nbytes for part in self.parts))
        self.parts = summed

    @property
    def is_under_way(self) -> bool:
        """Whether something is left to wait for."""
        return any(part.pending is not COMPLETED for part in self.parts)

    def settle(self) -> list[Reduced]:
        """Wait for the second sum, and average."""
        settled = []
        for part in self.parts:
            part.pending.wait()
            settled.append(self._averaged(part))
        self.unit.move(Phase.IDLE)
        return settled

    def drop(self) -> None:
        """Wait, since what is under way owns memory, and forget what comes of it."""
        for part in self.parts:
            with contextlib.suppress(RuntimeError):
                part.pending.wait()

    def _begin_copies(self, part: _Part) -> bool:
        """Start to sum over the copies of the shard; false where that is left to a later backward pass."""
        unit, part.pending = self.unit, COMPLETED
        replicate = unit.plan.topology.replicate
        if replicate is None:
            return True
        before = unit.partial.pop(part.handle, None)
        if before is not None:
            part.output += before.gradient
            part.arrived = bytes(a | b for a, b in zip(before.arrived, part.arrived, strict=True))
        if not unit.requires_all_reduce:
            unit.partial[part.handle] = PartialSum(part.output, part.arrived)
            return False
        if unit.hooks.all_reduce is not None:
            unit.hooks.all_reduce(part.output, part.output)
        elif unit.hooks.reduce is None or unit.plan.topology.shard.size > 1:
            copies = replicate if unit.plan.topology.shard.size > 1 else unit.summing
            part.pending = copies.all_reduce(part.output, label=unit.name)
        return True

    def _averaged(self, part: _Part) -> Reduced:
        handle, output = part.handle, part.output
        after = self.unit.averaging.after
        if after != 1.0:
            output.div_(after)
        if self.unit.plan.storage_device is None or not streams_of(handle.device).runs_ahead:
            return Reduced(handle, handle.for_grad(output), part.arrived)
        with streams_of(handle.device).downloading() as copies:
            gradient = handle.for_grad(output)
        return Reduced(handle, gradient, part.arrived, copies.end, output)
