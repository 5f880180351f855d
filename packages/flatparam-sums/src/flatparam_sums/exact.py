"""`reduction="exact"`: each gradient is the exact weighted sum of what micro-batches contribute, rounded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

import attrs
import torch
from torch import Tensor

from flatparam_comm import Averaging, Collectives, FlatParamHandle, Pending, Reducer
from flatparam_comm.collectives import Parts
from flatparam_runtime import FlatParamError
from flatparam_sums.expansions import Expansion, add_exactly, block_of, exact_sum, root_of, rounded, sum_exactly
from flatparam_sums.residuals import Residuals
from flatparam_sums.wire import Codec, Wire, WireGather, codec_of, encoded

_LABEL: Final = "exact sum"


@final
@attrs.define(eq=False)
class Collected:
    """The contribution of this rank's micro-batches to the gradient of one flat parameter."""

    first: Tensor
    """The first micro-batch's gradient, as autograd made it."""
    weight: float
    arrived: bytearray
    """For each parameter, 1 if it got a gradient."""
    total: Expansion = attrs.field(factory=list)
    """The exact sum, from the second micro-batch on."""

    def add(self, gradient: Tensor, weight: float, arrived: bytearray) -> None:
        """Add the gradient of one more micro-batch."""
        self.widen()
        add_exactly(self.total, gradient, weight)
        self.arrived = bytearray(a | b for a, b in zip(self.arrived, arrived, strict=True))

    def widen(self) -> None:
        """Have the sum as an expansion."""
        if not self.total:
            add_exactly(self.total, self.first, self.weight)
            self.first = self.first[:0]


@final
@attrs.define(eq=False)
class ExactSums:
    """The exact sums of a model's gradients; the plan of each of its units has it.

    Each rank gives every other one that rank's part of what it has: its gradient, if each rank has one micro-batch, and
    else the exact sum of its micro-batches, in float64. The owner adds these, and rounds once.

    With a `wire`, each rank rounds the sum of its own micro-batches to that format, and gives that: fewer bytes, and a
    result that depends on which rank did which micro-batch.
    """

    wire: Wire | None = None
    """The formats in which contributions travel; None sends them as they are."""
    weight: float = 1.0
    """The weight of the micro-batch whose gradients are collected."""
    widths: int = 0
    """The number of float64 tensors that each rank's sums travel in; 0 if gradients travel as they are."""
    weights: Sequence[float] = ()
    """The weight of each rank's micro-batch, if gradients travel as they are; empty if all are 1."""
    total: float | None = None
    """The divisor of the sum; None is the number of ranks."""
    residuals: Residuals = attrs.field(factory=Residuals)
    _collected: dict[FlatParamHandle, Collected] = attrs.field(factory=dict)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of a model has collected nothing.
        return ExactSums, (self.wire,)

    @property
    def first(self) -> Codec | None:
        """Return the codec in which contributions travel to the ranks that share a parameter."""
        return None if self.wire is None else self.wire.first

    @property
    def second(self) -> Codec | None:
        """Return the codec in which sums travel to the ranks that have copies of a shard."""
        return None if self.wire is None else self.wire.second

    @property
    def held_residuals(self) -> Residuals | None:
        """Return what rounding has lost, if that is to be kept."""
        return self.residuals if self.wire is not None and self.wire.feeds_back else None

    def averaging(self, reducer: Reducer, handles: Sequence[FlatParamHandle]) -> Averaging:
        """Return the factors of collecting and reducing: none, since the sum is divided before it is rounded.

        Raises:
            FlatParamError: if the sum over copies would come later, or a hook would replace a collective.
        """
        hooks, sums_later = reducer.hooks, reducer.synchronises and not reducer.sums_copies
        if sums_later or hooks.reduce is not None or hooks.all_reduce is not None:
            raise FlatParamError(
                f"rank {reducer.topology.rank}: expected reduction='exact' or a wire without a hook in "
                "the place of a reduction, and without set_requires_all_reduce(False); leave these out, or take the "
                "default reduction"
            )
        takes_parts = self.first is None and hasattr(reducer.topology.shard, "swap")
        return Averaging(in_parts=takes_parts and reducer.takes_parts(handles))

    # What micro-batches have contributed

    def collect(self, handles: Sequence[FlatParamHandle]) -> None:
        """Take over the gradients that a pass without synchronisation has collected."""
        for handle in handles:
            gradients = handle.gradients
            if gradients.is_empty:
                continue
            gradients.collect()
            arrived, held = bytearray(gradients.deposited), self._collected.get(handle)
            if held is None:
                self._collected[handle] = Collected(gradients.give_away(), self.weight, arrived)
            else:
                held.add(gradients.complete(), self.weight, arrived)
            gradients.release()

    def holds(self, handle: FlatParamHandle) -> bool:
        """Return whether gradients of `handle` were collected."""
        return handle in self._collected

    def drop(self, handle: FlatParamHandle, indices: Sequence[int]) -> None:
        """Drop what was collected of parameters `indices` of `handle`."""
        held = self._collected.get(handle)
        if held is None:
            return
        for index in indices:
            held.arrived[index] = 0
            for tensor in (held.first, *held.total):
                tensor[handle.layout.slots[index].span.as_slice()] = 0
        if not any(held.arrived):
            del self._collected[handle]

    def widen(self, several: bool) -> int:
        """Have sums in float64, if there are several; return how many tensors each takes, 0 if it is one gradient.

        Args:
            several: whether this rank has had more than one micro-batch.
        """
        if not several or self.first is not None:
            return 0
        for held in self._collected.values():
            held.widen()
        return max((len(held.total) for held in self._collected.values()), default=1)

    def begin_step(self, total: float, widths: int, weights: Sequence[float]) -> None:
        """Have the next reductions be those of weighted micro-batches."""
        self.total, self.widths, self.weights = total, widths, weights

    def reset(self) -> None:
        """Have the next reductions be those of plain backward passes; drop what was collected."""
        self.weight, self.total, self.widths, self.weights = 1.0, None, 0, ()
        self._collected.clear()

    # Reductions

    def begin(self, reducer: Reducer, handle: FlatParamHandle, label: str) -> tuple[Tensor, Pending]:
        """Issue the sum of one flat parameter's gradient.

        Returns:
            This rank's part of the sum, or all of it if nothing is sharded, and what to wait for before it is read.
        """
        shard, gradients = reducer.topology.shard, handle.gradients
        held, widths = self._collected.pop(handle, None), self.widths
        is_even = not handle.layout.uneven_numels and not handle.layout.is_chunked
        in_parts = hasattr(shard, "swap") and handle.gradients.is_apart and is_even
        ranks = float(reducer.topology.data_parallel_size)
        divisor = self.total or reducer.divide_factor or ranks
        if held is None and in_parts and not widths and not gradients.is_empty and shard.size > 1:
            output, parts = handle.begin_reduce_parts()
            factors = [*self.weights] or [1.0] * shard.size
            return output, _ExactSum(
                self, reducer, handle, [parts], factors, divisor, output, label, is_expanded=bool(self.weights)
            )
        if held is None:
            gradients.collect()
            held = Collected(gradients.complete(), self.weight, bytearray(gradients.deposited))
        elif not gradients.is_empty:
            # Passes without synchronisation were before this one: every rank has had as many.
            gradients.collect()
            held.add(gradients.complete(), self.weight, bytearray(gradients.deposited))
            widths = max(reducer.topology.exchange(len(held.total), label=_LABEL))
        given = [held.first]
        codec = self.first if shard.size > 1 else None
        if codec is not None:
            held.widen()
            given = [self._encoded(codec, handle, held, divisor)]
        elif widths or (self.second is not None and shard.size == 1):
            held.widen()
            given = [*held.total, *(torch.zeros_like(held.total[0]) for _ in range(widths - len(held.total)))]
        if handle.layout.is_chunked and codec is None:
            given = [handle.layout.chunks.joined(tensor) for tensor in given]
        gradients.deposited[:] = bytes(held.arrived)
        numel = given[0].numel() if shard.size == 1 else handle.layout.shard_numels[handle.rank]
        output = torch.empty(numel, dtype=gradients.dtype, device=given[0].device)
        is_weighed = widths or self.wire is not None or not self.weights
        factors = [1.0] * shard.size if is_weighed else [*self.weights]
        # On every rank alike, whatever it has itself.
        is_expanded = bool(widths or self.weights or self.wire)
        made = _ExactSum(
            self, reducer, handle, given, factors, divisor, output, label, is_expanded=is_expanded, codec=codec
        )
        return output, made

    def _encoded(self, codec: Codec, handle: FlatParamHandle, held: Collected, divisor: float) -> Tensor:
        """Return the bytes that this rank gives, its parts in the order of ranks."""
        layout, numels = handle.layout, [*handle.layout.shard_numels]
        residuals = self.held_residuals
        values = rounded(held.total, 1.0, codec.dtype if residuals is None else torch.float32)
        if residuals is not None:
            return residuals.encoded(codec, handle, values, divisor, held.arrived)
        return encoded(codec, layout.chunks.joined(values) if layout.is_chunked else values, numels)

    def norm(
        self,
        sharded: Mapping[tuple[Collectives, ...], Sequence[Tensor]],
        whole: Sequence[Tensor],
        norm_type: float,
        device: torch.device,
    ) -> Tensor:
        """Return the 2-norm of all gradients: the square root of the exact sum of their squares, in float32.

        Args:
            sharded: this rank's parts, by the groups over which they are spread; each rank asks each group.
            whole: the other gradients; each counts once.
            device: that of the result.

        Raises:
            ValueError: for a norm of another order.
        """
        if norm_type != 2.0:
            raise ValueError(
                "expected norm_type 2.0 or inf, of which reduction='exact' and a wire make the exact norm, found "
                f"{norm_type!r}"
            )
        parts = [_squares(whole)]
        for over, gradients in sharded.items():
            known = [_squares(gradients)]
            for group in over:
                known = [each for all_of in group.exchange(known, label="gradient norm") for each in all_of]
            parts += known
        return torch.tensor(root_of(sum(parts)), dtype=torch.float32, device=device)


@final
class _ExactSum:
    """A sum that is under way: over the ranks that share a parameter, and then over the copies of each shard."""

    def __init__(
        self,
        sums: ExactSums,
        reducer: Reducer,
        handle: FlatParamHandle,
        given: Sequence[Tensor | Parts],
        factors: Sequence[float],
        divisor: float,
        output: Tensor,
        label: str,
        *,
        is_expanded: bool,
        codec: Codec | None = None,
    ) -> None:
        self._codec, self._sums, self._handle = codec, sums, handle
        self._replicate, self._label = reducer.topology.replicate, label
        self._factors, self._divisor, self._output = factors, divisor, output
        self._is_over, self._pending = False, list[Pending]()
        self._is_expanded = is_expanded
        shard = reducer.topology.shard
        self._size = shard.size
        if shard.size == 1:
            self._received = [tensor for tensor in given if isinstance(tensor, Tensor)]
            return
        numels, own = [*handle.layout.shard_numels], output.numel()
        if codec is not None:
            numels, own = [codec.nbytes(numel) for numel in numels], codec.nbytes(own)
        self._received, self._pending = _exchanged(shard, given, numels, own, label)

    def done(self) -> bool:
        """Return whether what the other ranks have given is here."""
        return all(pending.done() for pending in self._pending)

    @property
    def moves_by_itself(self) -> bool:
        """Ask the exchanges whether they move bytes while nobody waits."""
        return any(getattr(pending, "moves_by_itself", False) for pending in self._pending)

    @torch.no_grad()
    def wait(self) -> None:
        """Add what every rank has given, and round."""
        if self._is_over:
            return
        for pending in self._pending:
            pending.wait()
        rows = [row for received in self._received for row in received.view(self._size, -1).unbind()]
        if self._codec is not None and self._output.numel():
            rows = [self._codec.decode(row, self._output.numel()) for row in rows]
        factors = [*self._factors] * len(self._received)
        if self._replicate is None or self._replicate.size == 1:
            sum_exactly(rows, factors, self._divisor, self._output)
        else:
            self._sum_over_copies(self._replicate, rows, factors)
        self._received, self._is_over = [], True

    def _sum_over_copies(self, replicate: Collectives, rows: Sequence[Tensor], factors: Sequence[float]) -> None:
        """Add over the copies, too: each rank a part, which it then gives to the others."""
        numel, size = self._output.numel(), replicate.size
        part = -(-numel // size)
        numels = [max(0, min(part, numel - rank * part)) for rank in range(size)]
        given: Sequence[Tensor] = rows
        codec, residuals = self._sums.second, self._sums.held_residuals
        if codec is not None or self._is_expanded or len(rows) > 1:
            total = Expansion()
            for row, factor in zip(rows, factors, strict=True):
                add_exactly(total, row, factor)
            if codec is None:
                # The ranks may need different numbers of tensors.
                most = max(replicate.exchange(len(total), label=_LABEL))
                given = [*total, *(torch.zeros_like(total[0]) for _ in range(most - len(total)))]
            elif residuals is None:
                given = [encoded(codec, rounded(total, 1.0, codec.dtype), numels)]
            else:
                values = rounded(total, 1.0, torch.float32)
                given = [residuals.encoded_sum(codec, self._handle, values, self._divisor, numels)]
        own = numels[replicate.rank]
        sizes = numels if codec is None else [codec.nbytes(each) for each in numels]
        received, pendings = _exchanged(replicate, given, sizes, sizes[replicate.rank], self._label)
        for pending in pendings:
            pending.wait()
        mine = torch.zeros(part, dtype=self._output.dtype, device=self._output.device)
        parts = [row for each in received for row in each.view(size, -1).unbind()]
        if codec is not None and own:
            parts = [codec.decode(each, own) for each in parts]
        sum_exactly(parts, [1.0] * len(parts), self._divisor, mine[:own])
        gathered = mine.new_empty(part * size)
        replicate.all_gather(gathered, mine, label=self._label).wait()
        self._output.copy_(gathered[:numel])


def _exchanged(
    group: Collectives, given: Sequence[Tensor | Parts], numels: Sequence[int], own: int, label: str
) -> tuple[list[Tensor], list[Pending]]:
    """Issue, for each tensor, the exchange by which each rank gets its part of every rank's."""
    numel = own * group.size
    received = [torch.empty(numel, dtype=each.dtype, device=each.device) for each in given]
    swap = getattr(group, "swap", None)
    if swap is not None and {*numels} == {own}:
        pairs = zip(received, given, strict=True)
        return received, [swap(output, each, label=label) for output, each in pairs]
    tensors = [each for each in given if isinstance(each, Tensor)]
    pendings = [
        group.all_to_all(output, tensor, output_numels=[own] * group.size, given_numels=numels, label=label)
        for output, tensor in zip(received, tensors, strict=True)
    ]
    return received, pendings


def _squares(gradients: Sequence[Tensor]) -> int | float:
    """Return the exact sum of the squares of float32 and narrower numbers, whose squares are float64."""
    flat = (gradient.detach().reshape(-1) for gradient in gradients)
    return exact_sum(block.double().square_() for each in flat for block in torch.split(each, block_of(each)))


def carriage(reduction: object, wire: object) -> dict[str, object]:
    """Return the fields of a `UnitPlan` that have gradients summed and parameters gathered in this way.

    Args:
        reduction: "default" or "exact".
        wire: "default", "bf16" (which is `Wire(reduce="bf16")`), or a `Wire`. Whatever travels in a format is added
            exactly.

    Raises:
        ValueError: for anything else.
    """
    if reduction not in ("default", "exact"):
        raise ValueError(f"expected reduction to be 'default' or 'exact', found {reduction!r}")
    if wire == "bf16":
        wire = Wire(reduce="bf16")
    if wire in ("default", "fp32"):
        wire = None
    if wire is not None and not isinstance(wire, Wire):
        raise ValueError(f"expected wire to be 'default', 'bf16', 'fp32' or a flatparam_sums.Wire, found {wire!r}")
    fields: dict[str, object] = {}
    if reduction == "exact" or (wire is not None and (wire.first or wire.second)):
        fields["sums"] = ExactSums(wire)
    if wire is not None and wire.gather is not None:
        fields["gathers"] = WireGather(codec_of(wire.gather))
    return fields
