"""What docs/memory.md says a step takes, in bytes, beside activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from bench.workloads import Workload

import flatparam_core

BYTES: int = 4
"""Of an element, in fp32."""


@frozen
class Bytes:
    """At rest between two steps with AdamW, and at the peaks of a forward and of a backward pass."""

    rest: int
    forward: int
    backward: int


@frozen
class Units:
    """A model whose parameters are all in units, which run one after the other.

    Attributes:
        numels: of each unit's parameters, in the order of the forward pass.
        ranks: how many share a flat parameter. Each shard is padded to a multiple of 16 bytes; the parameters have such
            lengths by themselves.
    """

    numels: Sequence[int]
    ranks: int

    @classmethod
    def of(cls, workload: Workload, ranks: int) -> Units:
        """The units of a workload.

        Raises:
            ValueError: where parameters are outside of them.
        """
        with torch.device("meta"):
            model = workload.model()
        units = [module for module in model.modules() if isinstance(module, workload.unit)]
        numels = [sum(p.numel() for p in unit.parameters()) for unit in units]
        if sum(numels) != sum(p.numel() for p in model.parameters()):
            raise ValueError("expected a model whose parameters are all in units, found some outside")
        return cls(numels, ranks)

    @property
    def full(self) -> list[int]:
        """`F`, and `G` too, as everything is trained: bytes of the full parameters, padding included."""
        return [-(-numel * BYTES // (16 * self.ranks)) * 16 * self.ranks for numel in self.numels]

    @property
    def rest(self) -> int:
        """Shards, and AdamW's two moments of each."""
        return 3 * sum(self.full) // self.ranks


def full_shard(units: Units, *, on_device: bool) -> Bytes:
    """FULL_SHARD. An accelerator gathers ahead in the forward pass, and reduces beside the next unit's backward."""
    full = units.full
    forward = max(full[k] + (_gathered_ahead(full[k + 1 :]) if on_device else 0) for k in _places(units))
    before = [0, *full]
    backward = max(_while_done(units, k, before[k], on_device) for k in _places(units))
    return Bytes(units.rest, units.rest + forward, units.rest + backward)


def shard_grad_op(units: Units, *, on_device: bool) -> Bytes:
    """SHARD_GRAD_OP: all full parameters are there at the end of the forward pass, and go one by one."""
    before = [sum(units.full[:k]) for k in _places(units)]
    backward = max(_while_done(units, k, before[k], on_device) for k in _places(units))
    return Bytes(units.rest, units.rest + sum(units.full), units.rest + backward)


def _gathered_ahead(following: Sequence[int]) -> int:
    """One unit, and more of them as long as they have no more than `runtime.prefetch_nbytes` together."""
    (threshold,) = (each for each in flatparam_core.all_thresholds() if each.name == "runtime.prefetch_nbytes")
    count = 0
    while count < len(following) and (not count or sum(following[: count + 1]) <= threshold.value):
        count += 1
    return sum(following[:count])


def _places(units: Units) -> range:
    return range(len(units.numels))


def _while_done(units: Units, k: int, unsharded_before: int, on_device: bool) -> int:
    """What unit `k` takes when it gets its gradients: autograd's, the flat ones, and the shards of those before it.

    The flat gradient takes the memory of the full parameters, when the reduction before it is over.
    """
    full, own = units.full, units.numels[k] * BYTES
    # Of one rank the flat gradient is the shard of the sum.
    in_reduction = full[k + 1] if on_device and units.ranks > 1 and k + 1 < len(full) else 0
    shards_of_gradients = sum(full[k + 1 :]) // units.ranks
    return full[k] + own + unsharded_before + in_reduction + shards_of_gradients
