"""The reduction of gradients: its settings, and one that is under way."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, final

import attrs
import torch
from torch import Tensor

from flatparam_comm.collectives import COMPLETED, Collectives, Pending, TakesParts, let_end, takes_parts
from flatparam_comm.topology.topology import Topology
from flatparam_comm.transfer.comm_hooks import CommHooks
from flatparam_comm.transfer.streams import Mark, streams_of
from flatparam_comm.transfer.uneven import check_even, scatter_sums
from flatparam_core import FlatParamHandle, Threshold

_WIDE: Final = frozenset({torch.bfloat16, torch.float32, torch.float64})
"""The dtypes in whose range sums of gradients stay without a division before the sum."""


@final
@attrs.frozen
class Averaging:
    """The factors that turn a sum over ranks into a mean; whichever are used, the bits are those of FSDP1."""

    before: float = 1.0
    """The divisor of gradients when they are collected."""
    after: float = 1.0
    """The divisor of the sum."""
    in_parts: bool = False
    """Whether gradients are summed from where autograd leaves them, without a flat buffer."""
    weight: float = 1.0
    """The factor of gradients when they are collected."""
    scale: float = 1.0
    """The factor of what was collected, before the sum; a power of two."""


class Weighs(Protocol):
    """The weights of micro-batches, by which gradients are collected and reduced; an add-on has them."""

    def of(self, mean: Averaging, reducer: Reducer, handles: Sequence[FlatParamHandle]) -> Averaging:
        """Return the factors of the weighted mean, from those of the plain one."""

    def reset(self) -> None:
        """Forget the weights: the gradients were dropped."""


class Sums(Protocol):
    """A way to sum gradients other than the backend's; an add-on has one."""

    def averaging(self, reducer: Reducer, handles: Sequence[FlatParamHandle]) -> Averaging:
        """Return the factors of collecting and of what `begin` gives."""

    def collect(self, handles: Sequence[FlatParamHandle]) -> None:
        """Take what a pass without synchronisation has collected of `handles`."""

    def begin(self, reducer: Reducer, handle: FlatParamHandle, label: str) -> tuple[Tensor, Pending]:
        """Issue the sum over all data-parallel ranks; returns where this rank's part will be, and its pending."""

    def holds(self, handle: FlatParamHandle) -> bool:
        """Return whether gradients of `handle` that were collected are here, and not in its ledger."""

    def drop(self, handle: FlatParamHandle, indices: Sequence[int]) -> None:
        """Drop these gradients."""

    def reset(self) -> None:
        """Drop everything."""

    def norm(
        self,
        sharded: Mapping[tuple[Collectives, ...], Sequence[Tensor]],
        whole: Sequence[Tensor],
        norm_type: float,
        device: torch.device,
    ) -> Tensor:
        """Return the norm of all gradients, but for that of infinite order; see `clip_gradients_`."""


@functools.cache
def averaging_over(
    ranks: int, divisor: float, dtypes: frozenset[torch.dtype], *, in_copy: bool = True, in_parts: bool = False
) -> Averaging:
    """Return the factors that divide a sum over `ranks` by `divisor`.

    Dividing by a power of two loses no bit, so it happens where it costs least: in the copy of gradients to the flat
    buffer if that is enough, else after the sum, which is only a shard. Only float16 needs a part of it before the sum.
    No collective is asked to divide or to multiply: plain sums are what every backend has, and NVLink's switches.

    Args:
        dtypes: the dtypes of the sums.
        in_copy: whether a division costs nothing in the copy, as on a CPU; on an accelerator it is a kernel of its own.
        in_parts: whether gradients are summed without being copied first.
    """
    before, after = split_divisor(divisor, ranks)
    if not dtypes <= _WIDE:
        return Averaging(before=before, after=after, in_parts=in_parts)
    if after == 1.0 and in_copy and not in_parts:
        return Averaging(before=before)
    return Averaging(after=divisor, in_parts=in_parts)


def gradient_divisors(ranks: int) -> tuple[float, float]:
    """Return the factors by which gradients are divided before and after the sum over `ranks`.

    The first is a power of two near the square root of `ranks`, so that neither the summands nor the sum leaves the
    range of a 16-bit dtype; the product of both is `ranks`. The rule is FSDP1's, so that the rounding is the same.
    """
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return float(before), ranks / before


def split_divisor(factor: float, ranks: int) -> tuple[float, float]:
    """Return the factors before and after the sum whose product is `factor`, a user's own divisor.

    The first factor is that of a mean over `ranks`, a power of two, so that it loses no bits.
    """
    before, _ = gradient_divisors(ranks)
    return before, factor / before


def _if_it_takes_parts(shard: Collectives) -> TakesParts | None:
    return shard if shard.size > 1 and takes_parts(shard) else None


_GRADIENTS: Final = operator.attrgetter("gradients")

PART_NBYTES: Final = Threshold(
    "runtime.part_nbytes",
    2**14,
    "Through shared memory a unit's gradients are reduced from where autograd left them if they have this many bytes "
    "on average; smaller ones are copied to a flat buffer first.",
    least=0,
)
"""Below this, cutting out a tensor costs more than its second copy."""


@final
@attrs.define(eq=False)
class Reduced:
    """The gradient of one flat parameter's shard, averaged, as `.grad` takes it."""

    handle: FlatParamHandle
    gradient: Tensor
    arrived: bytes
    """For each parameter, non-zero if this rank had a gradient."""
    landed: Mark | None = None
    """The point at which the gradient is in the host's memory, if it is still being copied there."""
    source: Tensor | None = None
    """The tensor that the gradient is copied from."""
    divisor: float = 1.0
    """The number by which it still has to be divided."""

    def let_go(self) -> None:
        """Free the source of the copy, for work of the current stream after the copy."""
        if self.landed is not None and self.source is not None:
            self.landed.wait()
            self.source = None


@final
@attrs.define(eq=False)
class PartialSum:
    """A gradient that is summed inside the shard group and not yet over its copies, in the reduction dtype."""

    gradient: Tensor
    arrived: bytes


@final
@attrs.define(eq=False)
class Reducer:
    """The settings that turn a unit's gradients into their mean over ranks, and what waits for the next reduction."""

    topology: Topology
    synchronises: bool = True
    """Whether the next backward pass reduces gradients."""
    sums_copies: bool = True
    """Whether reduced shards are summed over their copies, if there are any, or wait for a pass that sums them."""
    divide_factor: float | None = None
    """The divisor of the sum of the gradients; `None` is the number of ranks, which makes the sum a mean."""
    hooks: CommHooks = attrs.field(factory=CommHooks)
    sums: Sums | None = None
    """How gradients are summed; `None`: by the backend."""
    weighing: Weighs | None = None
    """The weights of micro-batches, one for all units of a model; `None` if there never were any."""
    unsynced: set[FlatParamHandle] = attrs.field(factory=set)
    """Flat parameters trained since the last reduction, by passes that did not reduce, or until they were frozen."""
    _partial: dict[FlatParamHandle, PartialSum] = attrs.field(factory=dict)
    """Reduced shards that wait to be summed over their copies."""
    _ranks: int = attrs.field(default=attrs.Factory(lambda it: it.topology.data_parallel_size, takes_self=True))
    _of_parts: TakesParts | None = attrs.field(
        default=attrs.Factory(lambda it: _if_it_takes_parts(it.topology.shard), takes_self=True)
    )
    """The shard group, if it can sum gradients from where autograd leaves them."""
    _averaged_of: tuple[object, ...] = ()
    """The settings and gradients that `_averaging` is of."""
    _averaging: Averaging = attrs.field(factory=Averaging)

    def copy(self) -> Reducer:
        """Return the same settings, with no gradients that wait."""
        # The groups are not asked again: they may have been destroyed.
        fresh: dict[str, Any] = {"unsynced": set(), "partial": {}, "averaged_of": (), "weighing": None}
        return attrs.evolve(self, hooks=attrs.evolve(self.hooks), sums=copy.copy(self.sums), **fresh)

    def __deepcopy__(self, memo: dict[int, object]) -> Reducer:
        # A copy of a model works over the same ranks.
        return self.copy()

    def __reduce__(self) -> tuple[object, ...]:
        # What reads it asks its own group whether it sums parts.
        settings = self.synchronises, self.sums_copies, self.divide_factor, self.hooks, self.sums
        return Reducer, (self.topology, *settings)

    def averaging(self, handles: Sequence[FlatParamHandle]) -> Averaging:
        """Return the factors that turn the sum of the gradients of `handles` over ranks into their mean."""
        if self.sums is not None:
            mean = self.sums.averaging(self, handles)
            return mean if self.weighing is None else self.weighing.of(mean, self, handles)
        hooks = self.hooks
        of = (hooks.reduce, hooks.all_reduce, self.divide_factor, PART_NBYTES.value, *map(_GRADIENTS, handles))
        if of != self._averaged_of:
            self._averaged_of, self._averaging = of, self._averaging_now(handles)
        if self.weighing is not None:
            return self.weighing.of(self._averaging, self, handles)
        return self._averaging

    def _averaging_now(self, handles: Sequence[FlatParamHandle]) -> Averaging:
        topology, hooks = self.topology, self.hooks
        if hooks.reduce is not None:
            # The hook averages over its own ranks.
            replicas = self._ranks // topology.shard.size
            if topology.shard.size == 1 or hooks.all_reduce is not None:
                replicas = 1
            return Averaging(after=float(replicas))
        # A hook for the sum over copies averages over them.
        size = topology.shard.size if hooks.all_reduce is not None else self._ranks
        factor = float(size) if self.divide_factor is None else self.divide_factor * size / self._ranks
        dtypes = frozenset([handle.gradients.dtype for handle in handles])
        device = handles[0].device if handles else torch.device("cpu")
        # Chunks are cut out of the gradients by the call that collects them.
        in_parts = all(handle.layout.is_chunked for handle in handles) or self.takes_parts(handles)
        return averaging_over(size, factor, dtypes, in_copy=device.type == "cpu", in_parts=in_parts)

    def takes_parts(self, handles: Sequence[FlatParamHandle]) -> bool:
        """Return whether the shard group takes gradients from where autograd leaves them, and they are large."""
        return self._of_parts is not None and self._are_large(handles)

    @staticmethod
    def _are_large(handles: Sequence[FlatParamHandle]) -> bool:
        if any(handle.device.type != "cpu" for handle in handles):
            return False
        nbytes = sum(handle.gradients.buffer.nbytes for handle in handles)
        return nbytes >= PART_NBYTES.value * sum(len(handle.layout.slots) for handle in handles)

    def issue(
        self, handles: Sequence[FlatParamHandle], *, label: str = "", averaging: Averaging | None = None
    ) -> Reduction:
        """Issue the sums of the collected gradients of `handles` over the ranks that they are sharded over.

        Args:
            averaging: the factors that the gradients were collected with; by default those of `handles`. If they were
                collected together with others, which are not summed, the factors are those of all.
        """
        if averaging is None:
            averaging = self.averaging(handles)
        shard, hook = self.topology.shard, self.hooks.reduce
        parts = []
        for handle in handles:
            pending: Pending | None = None
            layout = handle.forms.layout
            is_plain = not layout.uneven_numels and not layout.is_chunked
            is_plain = is_plain and averaging.scale == 1.0
            if self.sums is not None:
                output, pending = self.sums.begin(self, handle, label)
            elif self._of_parts is not None and averaging.in_parts and is_plain and handle.gradients.is_apart:
                output, apart = handle.begin_reduce_parts()
                pending = self._of_parts.reduce_scatter_parts(output, apart, label=label)
            else:
                output, full = handle.begin_reduce()
                if averaging.scale != 1.0:
                    full *= averaging.scale
                if hook is not None:
                    check_even(handle.layout, "the hook in the place of the reduce-scatter")
                    hook(full, output)
                elif layout.uneven_numels:
                    pending = scatter_sums(shard, layout, output, full, label=label)
                else:
                    pending = shard.reduce_scatter(output, full, label=label)
            parts.append(_ShardSum(handle, output, pending))
        return Reduction(self, label, averaging, parts)

    def sum_over_copies(self, part: _ShardSum, label: str) -> bool:
        """Issue the sum of `part` over the copies of its shard; returns False if a later backward pass issues it."""
        part.pending = None
        replicate = self.topology.replicate
        if replicate is None or self.sums is not None:
            return True
        before = self._partial.pop(part.handle, None)
        if before is not None:
            part.output += before.gradient
            part.arrived = bytes(a | b for a, b in zip(before.arrived, part.arrived, strict=True))
        if not self.sums_copies:
            self._partial[part.handle] = PartialSum(part.output, part.arrived)
            return False
        if self.hooks.all_reduce is not None:
            self.hooks.all_reduce(part.output, part.output)
        elif self.hooks.reduce is None or self.topology.shard.size > 1:
            part.pending = replicate.all_reduce(part.output, label=label)
        return True

    @property
    def waits(self) -> bool:
        """Whether gradients wait for a later reduction, or for its sum over copies."""
        return bool(self.unsynced or self._partial)

    def has_left(self, handles: Sequence[FlatParamHandle]) -> bool:
        """Return whether gradients of `handles` that were collected wait."""
        return any(
            not handle.gradients.is_empty or (self.sums is not None and self.sums.holds(handle)) for handle in handles
        )

    def drop(self, handle: FlatParamHandle, indices: Sequence[int]) -> None:
        """Drop what waits for the next reduction of parameters `indices` of `handle`; that reduction still comes."""
        handle.gradients.drop(indices)
        if self.sums is not None:
            self.sums.drop(handle, indices)
        partial = self._partial.get(handle)
        if partial is None:
            return
        fragments, arrived = handle.layout.fragments(handle.rank), bytearray(partial.arrived)
        for index in indices:
            arrived[index] = 0
            partial.gradient[fragments[index].in_shard.as_slice()] = 0
        partial.arrived = bytes(arrived)

    def forget(self) -> None:
        """Drop the gradients that wait for the next reduction."""
        self.unsynced.clear()
        self._partial.clear()
        if self.sums is not None:
            self.sums.reset()
        if self.weighing is not None:
            self.weighing.reset()


@final
@attrs.define(eq=False)
class _ShardSum:
    """The sum of one flat parameter's gradient: its pending, the shard it fills, which parameters had a gradient."""

    handle: FlatParamHandle
    output: Tensor
    pending: Pending | None
    arrived: bytes = b""


@final
@attrs.define(eq=False)
class Reduction:
    """The owner of the tensors of a reduction until it is settled: the full gradients, and the shards of their sums.

    There are two sums: over the ranks that a parameter is sharded over, and then over the copies of each shard, if
    there are any.
    """

    _reducer: Reducer
    _label: str
    _averaging: Averaging
    _parts: list[_ShardSum]

    def replicate(self) -> int:
        """Wait for the first sum, free the unsharded gradients, and start the second.

        Returns:
            The number of bytes that were freed.
        """
        summed, nbytes = [], 0
        for part in self._parts:
            if part.pending is not None:
                try:
                    part.pending.wait()
                except BaseException:
                    let_end(each.pending for each in self._parts)
                    raise
            gradients = part.handle.gradients
            part.arrived = bytes(gradients.deposited)
            gradients.release()
            nbytes += gradients.buffer.nbytes
            if self._reducer.sum_over_copies(part, self._label):
                summed.append(part)
        self._parts = summed
        return nbytes

    @property
    def is_under_way(self) -> bool:
        """Whether a sum is left to wait for."""
        return any(part.pending not in (None, COMPLETED) for part in self._parts)

    def settle(self, *, divides: bool = True) -> list[Reduced]:
        """Wait for the second sum, and average.

        Args:
            divides: divide each gradient now; else the caller divides those that stay where they are, many at once.
        """
        settled = []
        for part in self._parts:
            if part.pending is not None:
                part.pending.wait()
            if part.handle.forms.meshes is not None:
                part.handle.forms.meshes.complete(part.handle, part.output, label=self._label)
            settled.append(self._averaged(part, divides))
        return settled

    def drop(self) -> None:
        """Wait, since the sums under way own memory, and drop the results."""
        for part in self._parts:
            with contextlib.suppress(RuntimeError):
                if part.pending is not None:
                    part.pending.wait()

    def _averaged(self, part: _ShardSum, divides: bool) -> Reduced:
        handle, output, divisor = part.handle, part.output, self._averaging.after
        if divisor != 1.0:
            if not divides and output.dtype == handle.forms.stepped and not handle.is_offloaded:
                return Reduced(handle, output, part.arrived, divisor=divisor)
            output.div_(divisor)
        if not (handle.is_offloaded and streams_of(handle.forms.device).runs_ahead):
            return Reduced(handle, handle.for_grad(output), part.arrived)
        with streams_of(handle.device).downloading() as copies:
            gradient = handle.for_grad(output)
        return Reduced(handle, gradient, part.arrived, copies.end, output)
