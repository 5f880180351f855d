"""N ranks in one process by hand: equal modules, each sharded for its rank, and collectives as plain tensor code.

Gather is ``torch.cat`` of the ranks' shards; reduce is a sum in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from flatparam_core import FlatParamHandle, Precision, flatten_module
from flatparam_core.testing import check_invariants


class Ranks:
    """``world_size`` copies of one module, copy ``r`` sharded as rank ``r``."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        world_size: int,
        *,
        use_orig_params: bool = False,
        precision: Precision | None = None,
    ) -> None:
        self.world_size = world_size
        self.modules = [seeded(make) for _ in range(world_size)]
        self.handles = [
            flatten_module(
                module,
                rank=rank,
                world_size=world_size,
                use_orig_params=use_orig_params,
                precision=precision,
            )
            for rank, module in enumerate(self.modules)
        ]

    def check(self) -> None:
        """Check that every handle of every rank keeps its promises."""
        for handles in self.handles:
            for handle in handles:
                check_invariants(handle)

    def unshard(self, *, full_precision: bool = False) -> None:
        for same in zip(*self.handles, strict=True):
            gather(same, full_precision=full_precision)
        self.check()

    def reshard(self) -> None:
        for handles in self.handles:
            for handle in handles:
                handle.reshard()
        self.check()

    def deposit(self, divisor: float = 1.0) -> None:
        for handles in self.handles:
            for handle in handles:
                for index in range(len(handle.leaves)):
                    handle.deposit(index, divisor=divisor)

    def reduce(self, divisor: float = 1.0) -> None:
        for same in zip(*self.handles, strict=True):
            if any(leaf.requires_grad for handle in same for leaf in handle.leaves):
                reduce(same, divisor=divisor)
        self.check()

    def backward(self, losses: Sequence[torch.Tensor]) -> None:
        """Turn one loss per rank into ``.grad`` of what the optimizers hold: the mean over ranks."""
        for loss in losses:
            loss.backward()
        self.deposit(divisor=self.world_size)
        self.reshard()
        self.reduce()

    def full_parameters(self, rank: int = 0) -> dict[str, torch.Tensor]:
        """A copy of the unsharded parameters, as ``rank`` sees them."""
        self.unshard()
        full = {
            name: leaf.detach().clone()
            for handle in self.handles[rank]
            for name, leaf in zip(handle.layout.fqns, handle.leaves, strict=True)
        }
        self.reshard()
        return full

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradient of each parameter that has one, from the flat parameters' shards."""
        found: dict[str, torch.Tensor] = {}
        for same in zip(*self.handles, strict=True):
            shards = [handle.flat_param.grad for handle in same]
            if all(shard is None for shard in shards):
                continue
            flat = torch.cat([shard for shard in shards if shard is not None])
            for slot in same[0].layout.slots:
                found[slot.spec.fqn] = flat.as_strided(slot.spec.shape, slot.spec.stride, slot.span.start)
        return found


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the same module on every call."""
    torch.manual_seed(7)
    return make()


def gather(handles: Sequence[FlatParamHandle], *, full_precision: bool = False) -> None:
    """Unshard one flat parameter on all its ranks."""
    begun = [handle.begin_unshard(full_precision=full_precision) for handle in handles]
    full = torch.cat([shard for _, shard in begun])
    for output, _ in begun:
        output.copy_(full)
    for handle in handles:
        handle.finish_unshard()


def reduce(handles: Sequence[FlatParamHandle], *, divisor: float = 1.0) -> None:
    """Reduce the deposited gradients of one flat parameter over all its ranks."""
    arrived = [max(ranks) for ranks in zip(*(handle.gradients.deposited for handle in handles), strict=True)]
    begun = [handle.begin_reduce() for handle in handles]
    total = begun[0][1].clone()
    for _, full in begun[1:]:
        total += full
    for rank, (handle, (output, _)) in enumerate(zip(handles, begun, strict=True)):
        output.copy_(total[handle.layout.shard_span(rank).as_slice()])
        handle.finish_reduce(output, arrived=arrived, divisor=divisor)


def flatten_alone(
    module: nn.Module, *, use_orig_params: bool = False, precision: Precision | None = None
) -> FlatParamHandle:
    """Shard a module that makes one flat parameter for a world of one rank."""
    (handle,) = flatten_module(module, rank=0, world_size=1, use_orig_params=use_orig_params, precision=precision)
    return handle
