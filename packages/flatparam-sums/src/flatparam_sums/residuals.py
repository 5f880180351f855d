"""Error feedback: what a rank's rounding has lost of its gradients, which it adds to the next ones.

The rule is that of F. Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_comm import FlatParamHandle
from flatparam_runtime import FlatParamError, Topology, Unit, units_in
from flatparam_sums.wire import Codec, decoded, encoded

KEY: Final = "wire_residual"
"""The name under which the optimizer's state holds it."""


@final
@attrs.define(eq=False)
class Residuals:
    """The losses of this rank's roundings, in float32, divided as gradients are, so that weights may change."""

    first: dict[FlatParamHandle, Tensor] = attrs.field(factory=dict)
    """Of contributions: 1-D, as long as the full flat parameter, in its order."""
    second: dict[FlatParamHandle, Tensor] = attrs.field(factory=dict)
    """Of sums over the ranks that share a parameter: 1-D, as long as this rank's shard."""

    def encoded(
        self, codec: Codec, handle: FlatParamHandle, values: Tensor, divisor: float, arrived: Sequence[int]
    ) -> Tensor:
        """Return the bytes of a contribution with what was lost before; remember what is lost now.

        Args:
            values: float32, the contribution in the order of the flat parameter; overwritten.
            divisor: that of the sum.
            arrived: for each parameter, not 0 if it has a gradient; the others keep what they have lost.
        """
        layout, before = handle.layout, self.first.get(handle)
        if before is not None:
            values.add_(before, alpha=divisor)
        resting = [slot.span.as_slice() for slot, has in zip(layout.slots, arrived, strict=True) if not has]
        for span in resting:
            values[span] = 0
        numels = [*layout.shard_numels]
        given = encoded(codec, layout.chunks.joined(values) if layout.is_chunked else values, numels)
        kept = decoded(codec, given, numels).float()
        if layout.is_chunked:
            kept, shards = torch.empty_like(values), kept
            layout.chunks.spread(kept, shards)
        lost = _lost(values, kept, divisor)
        for span in resting:
            lost[span] = 0 if before is None else before[span]
        self.first[handle] = lost
        return given

    def encoded_sum(
        self, codec: Codec, handle: FlatParamHandle, values: Tensor, divisor: float, numels: list[int]
    ) -> Tensor:
        """Return the bytes of a shard of the sum, in parts of `numels`, with what was lost before; remember the loss.

        Args:
            values: float32; overwritten.
            divisor: that of the sum.
        """
        before = self.second.get(handle)
        if before is not None:
            values.add_(before, alpha=divisor)
        given = encoded(codec, values, numels)
        self.second[handle] = _lost(values, decoded(codec, given, numels).float(), divisor)
        return given

    @torch.no_grad()
    def summed(self, handle: FlatParamHandle, topology: Topology) -> Tensor:
        """Return the sum over all ranks, of which each has its shard; every rank calls it."""
        layout, shard = handle.layout, topology.shard
        first, second = self.first.get(handle), self.second.get(handle)
        own = layout.shard_numels[handle.rank]
        total = torch.zeros(own, device=handle.forms.device)
        if shard.size > 1:
            full = torch.zeros(layout.numel, device=total.device) if first is None else first
            received = full.new_empty(shard.size * own)
            shard.all_to_all(
                received,
                layout.chunks.joined(full) if layout.is_chunked else full,
                output_numels=[own] * shard.size,
                given_numels=layout.shard_numels,
                label=KEY,
            ).wait()
            total = received.view(shard.size, -1).sum(0)
        if second is not None:
            total += second
        if topology.replicate is not None:
            topology.replicate.all_reduce(total, label=KEY).wait()
        return total

    @torch.no_grad()
    def restore(self, handle: FlatParamHandle, topology: Topology, total: Tensor) -> None:
        """Have the ranks' losses add up to the sum of which `total` is this rank's shard: one rank has each part."""
        layout = handle.layout
        if topology.replicate is not None and topology.replicate.rank != 0:
            total = torch.zeros_like(total)
        self.first.pop(handle, None)
        self.second.pop(handle, None)
        if topology.shard.size == 1:
            self.second[handle] = total
            return
        shards = torch.zeros(layout.numel, device=total.device)
        shards[layout.shard_span(handle.rank).as_slice()] = total
        full = shards
        if layout.is_chunked:
            full = torch.empty_like(shards)
            layout.chunks.spread(full, shards)
        self.first[handle] = full


def _lost(values: Tensor, kept: Tensor, divisor: float) -> Tensor:
    """Return what rounding has lost; nothing, if it is not finite: the step is lost, and not those after it."""
    return values.sub_(kept).div_(divisor).nan_to_num_(0.0, 0.0, 0.0)


def save_residuals(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put what roundings have lost into the optimizer's state, before it is saved; every rank calls it.

    Each parameter with a state gets one more tensor of its shape, `wire_residual`, so that whatever saves, loads and
    reshards the optimizer's state does so with this. Nothing happens to units without error feedback.

    Args:
        module: the outermost sharded module.
        optimizer: of its parameters.
    """
    for unit, residuals in _fed(module):
        for handle in unit.handles:
            total = residuals.summed(handle, unit.topology)
            for parameter, span in _places(handle):
                if parameter in optimizer.state:
                    part = total[span].view_as(parameter)
                    optimizer.state[parameter][KEY] = part.to(parameter.device, copy=True)


def load_residuals(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take what `save_residuals` has put into the optimizer's state out again, after it was loaded, on every rank.

    The world may be another one than that which saved. If the state has none, nothing was lost.

    Raises:
        FlatParamError: if the tensor in the state has another shape than the parameter.
    """
    for unit, residuals in _fed(module):
        for handle in unit.handles:
            total = torch.zeros(handle.layout.shard_numels[handle.rank], device=handle.forms.device)
            for parameter, span in _places(handle):
                part = optimizer.state.get(parameter, {}).pop(KEY, None)
                if part is None:
                    continue
                if part.numel() != parameter.numel():
                    raise FlatParamError(
                        f"unit {unit.name!r}, rank {unit.topology.rank}: expected {KEY!r} of {parameter.numel()} "
                        f"elements in the optimizer's state, found {part.numel()}; load the optimizer's state first"
                    )
                total[span] = part.reshape(-1).to(total)
            residuals.restore(handle, unit.topology, total)


def _fed(module: nn.Module) -> Iterator[tuple[Unit, Residuals]]:
    """Yield the units that feed errors back, with what they have lost."""
    for unit in units_in(module):
        residuals = getattr(unit.reducer.sums, "held_residuals", None)
        if residuals is not None:
            yield unit, residuals


def _places(handle: FlatParamHandle) -> Iterator[tuple[nn.Parameter, slice]]:
    """Yield the parameters that an optimizer has, and where each lies in the shard."""
    listed = handle.exposure.listed()
    if len(listed) == 1 and listed[0] is handle.flat_param:
        yield handle.flat_param, slice(0, handle.flat_param.numel())
        return
    for parameter, fragment in zip(listed, handle.layout.fragments(handle.rank), strict=True):
        yield parameter, fragment.in_shard.as_slice()
