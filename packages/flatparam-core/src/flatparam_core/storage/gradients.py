"""The gradients of a unit's parameters, in one flat buffer, until they are reduced."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Final, final

import attrs
import torch
from torch import nn
from typing_extensions import Self

from flatparam_core.errors import FlatParamError
from flatparam_core.geometry import FlatLayout, Unflattened
from flatparam_core.storage.buffer import BufferPool, FlatBuffer
from flatparam_core.thresholds import Threshold

_DIVISOR: Final = operator.itemgetter(1)


@functools.cache
def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    return torch.promote_types(wide, narrow) == wide


def _is_exact(factor: float) -> bool:
    """Return whether multiplication by `factor` loses nothing: it is a power of two."""
    return math.frexp(factor)[0] == 0.5


SMALL_NBYTES: Final = Threshold(
    "core.small_gradient_nbytes",
    2**16,
    "On a CPU gradients up to here that arrive together are copied by a few calls for all; a larger one by a call of "
    "its own. On an accelerator one call copies all.",
    least=0,
)
"""Up to this size a CPU takes longer to handle a gradient than to copy it."""


@final
@attrs.frozen(eq=False)
class _Batch:
    """Gradients that arrive together, as indices among them: small ones, and large ones."""

    small: list[int]
    large: list[int]
    stretches: list[torch.Tensor]
    """The slots of the small ones as few views: neighbours are one view, with the padding between them."""

    @classmethod
    def of(cls, buffer: FlatBuffer, indices: Sequence[int]) -> Self:
        small, large = [], []
        bounds: list[list[int]] = []
        previous = -2
        most = SMALL_NBYTES.value if buffer.tensor.is_cpu else buffer.nbytes
        for at, index in enumerate(indices):
            span = buffer.layout.slots[index].span
            if span.numel * buffer.tensor.itemsize > most:
                large.append(at)
                continue
            small.append(at)
            if index == previous + 1:
                bounds[-1][1] = span.stop
            else:
                bounds.append([span.start, span.stop])
            previous = index
        return cls(small, large, [buffer.tensor[start:stop] for start, stop in bounds])


@final
@attrs.define(eq=False)
class GradientLedger:
    """The unsharded gradients of one flat parameter since the last reduction, summed, in the reduction dtype.

    Each gradient is copied once, with its cast and its averaging factor, straight to its slot: when it is deposited, or
    when all kept gradients are collected. Invariant: the buffer is allocated exactly while some slot was deposited or
    the buffer is being reduced.
    """

    buffer: FlatBuffer
    deposited: bytearray
    """One byte per parameter: 1 if a gradient has arrived since the last release."""
    _turns: bytearray = attrs.field(
        init=False, default=attrs.Factory(lambda self: bytearray(len(self.deposited)), takes_self=True)
    )
    """One byte per parameter: whether an odd number of gradients was deposited since the last release."""
    _slots: tuple[torch.Tensor, ...] = ()
    _kept: dict[int, tuple[torch.Tensor, float]] = attrs.field(factory=dict)
    """Gradients that are where autograd left them, by parameter, with their divisors."""
    _batches: dict[tuple[int, ...], _Batch] = attrs.field(factory=dict)
    _has_zeros: bool = False
    """Whether the padding was written since the last release, so that nothing undefined is ever reduced."""
    _zeros: dict[torch.dtype, list[torch.Tensor]] = attrs.field(factory=dict)
    """By dtype, zeros for each stretch of padding."""

    @classmethod
    def create(
        cls, layout: FlatLayout, *, dtype: torch.dtype, device: torch.device, pool: BufferPool | None = None
    ) -> Self:
        """Return an empty ledger; it takes no memory until the first deposit."""
        return cls(FlatBuffer.create(layout, dtype=dtype, device=device, pool=pool), bytearray(len(layout.slots)))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self.buffer.tensor.dtype

    @property
    def is_full(self) -> bool:
        """Whether each parameter has got as many gradients as every other since the last release, and at least one.

        So it turns true with the last gradient of a backward pass through all parameters, and false with the first one
        of the next pass, whether there was a reduction in between or not.
        """
        turns = {turn ^ (index in self._kept) for index, turn in enumerate(self._turns)}
        if len(turns) != 1:
            return False
        return all(arrived or index in self._kept for index, arrived in enumerate(self.deposited))

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has arrived since the last release."""
        return not (any(self.deposited) or self._kept)

    def arrived(self) -> list[tuple[int, torch.Tensor]]:
        """Return each gradient that has arrived since the last release, with the index of its parameter."""
        deposited = [(index, self._slots[index]) for index, flag in enumerate(self.deposited) if flag]
        return deposited + [(index, gradient) for index, (gradient, _) in self._kept.items()]

    def keep(self, index: int, gradient: torch.Tensor, *, divisor: float = 1.0) -> None:
        """Leave the gradient where it is, and deposit it at the latest when the flat gradient is completed.

        If the first gradient of a flat parameter comes long before its last, as that of a language model's head does,
        no whole buffer is needed in between. A second gradient of a parameter is deposited with the first one at once.
        """
        if self.deposited[index] or index in self._kept:
            self.deposit(index, gradient, divisor=divisor)
        else:
            self._kept[index] = gradient.detach(), divisor

    def keep_all(self, indices: Sequence[int], gradients: Sequence[torch.Tensor], *, divisor: float = 1.0) -> None:
        """Do what `keep` does of each of `gradients`."""
        if self.is_empty and not torch.is_grad_enabled():
            self._kept = {index: (gradient, divisor) for index, gradient in zip(indices, gradients, strict=True)}
            return
        for index, gradient in zip(indices, gradients, strict=True):
            self.keep(index, gradient, divisor=divisor)

    def collect(self) -> None:
        """Deposit the kept gradients; a few calls handle all small ones."""
        if not self._kept:
            return
        kept, self._kept = self._kept, {}
        for divisor in {divisor for _, divisor in kept.values()}:
            indices = sorted(index for index, (_, own) in kept.items() if own == divisor)
            self._deposit_all(indices, [kept[index][0] for index in indices], divisor)

    @property
    def is_apart(self) -> bool:
        """Whether all gradients that have arrived are where autograd left them, to be taken as they are."""
        return not any(self.deposited) and {1.0}.issuperset(map(_DIVISOR, self._kept.values()))

    def hand_over(self) -> Unflattened:
        """Return the kept gradients as a flat gradient that is not made; until `release` they count as deposited.

        Raises:
            FlatParamError: if `is_apart` is false.
        """
        if not self.is_apart:
            raise FlatParamError(f"{self.buffer.layout.fqns[0]}, ...: some gradients are in the flat buffer already")
        return Unflattened(self.buffer.layout, self.dtype, self.buffer.tensor.device, self._hand_over())

    def _hand_over(self) -> dict[int, torch.Tensor]:
        kept, self._kept = self._kept, {}
        for index in kept:
            self.deposited[index] = 1
        return {index: gradient for index, (gradient, _) in kept.items()}

    def deposit(self, index: int, gradient: torch.Tensor, *, divisor: float = 1.0, weight: float = 1.0) -> None:
        """Add `weight * gradient / divisor` to the slot of parameter `index`.

        Args:
            index: the parameter's index in the layout.
            gradient: in the shape of the parameter, of any floating or complex dtype that casts to the ledger's.
            divisor: the averaging factor before the reduction; a power of two loses nothing.
            weight: that of the micro-batch; the product is rounded once, to the wider of the two dtypes.
        """
        self._collect_kept([index])
        self.open()
        slot = self._slots[index]
        gradient = gradient.detach()
        if weight != 1.0:
            wide = gradient.to(torch.promote_types(gradient.dtype, slot.dtype))
            gradient, divisor = wide * (weight / divisor), 1.0
        widens = gradient.dtype != slot.dtype and _holds(slot.dtype, gradient.dtype)
        # The gradient is divided before it loses anything.
        if divisor != 1.0 and gradient.dtype != slot.dtype and not widens:
            gradient = gradient.to(torch.promote_types(gradient.dtype, slot.dtype))
        if self.deposited[index] and _is_exact(1 / divisor):
            slot.add_(gradient, alpha=1 / divisor)
        elif self.deposited[index]:
            slot.add_((gradient.to(slot.dtype) if widens else gradient) / divisor)
        elif divisor == 1.0 or widens:
            slot.copy_(gradient)
            if divisor != 1.0:
                # The division comes after the cast, so that nothing underflows.
                slot.div_(divisor)
        else:
            torch.div(gradient, divisor, out=slot)
        self.deposited[index] = 1
        self._turns[index] ^= 1

    def deposit_all(self, indices: Sequence[int], gradients: Sequence[torch.Tensor], *, divisor: float = 1.0) -> None:
        """Deposit the kept gradients, and each of `gradients` at its index; a few calls handle all small ones."""
        if self._kept:
            self.collect()
        if gradients:
            self._deposit_all(indices, gradients, divisor)

    def _collect_kept(self, indices: Sequence[int]) -> None:
        if self._kept and any(index in self._kept for index in indices):
            self.collect()

    def _deposit_all(self, indices: Sequence[int], gradients: Sequence[torch.Tensor], divisor: float) -> None:
        dtype = self.buffer.tensor.dtype
        # 1 stands for a gradient of a second backward pass before the reduction.
        again = set(map(self.deposited.__getitem__, indices))
        at_once = again == {0} and divisor == 1.0
        if not at_once and all(_holds(dtype, given) for given in {g.dtype for g in gradients}):
            at_once = again == {0} or (again == {1} and _is_exact(1 / divisor))
        one_by_one: Sequence[int] = range(len(indices))
        if at_once:
            self.open()
            batch = self._batch(tuple(indices))
            one_by_one = batch.large
            # torch refuses an empty list.
            if batch.small:
                self._deposit_small(batch, indices, gradients, divisor, add=again == {1})
        for at in one_by_one:
            self.deposit(indices[at], gradients[at], divisor=divisor)

    def _deposit_small(
        self, batch: _Batch, indices: Sequence[int], gradients: Sequence[torch.Tensor], divisor: float, *, add: bool
    ) -> None:
        if torch.is_grad_enabled():
            # In most backward passes it is not, and to enter the context takes longer than the copies.
            with torch.no_grad():
                self._deposit_small(batch, indices, gradients, divisor, add=add)
            return
        slots = [*map(self._slots.__getitem__, map(indices.__getitem__, batch.small))]
        given = [*map(gradients.__getitem__, batch.small)]
        turns, deposited = self._turns, self.deposited
        for at in batch.small:
            index = indices[at]
            turns[index] ^= 1
            deposited[index] = 1
        if add:
            torch._foreach_add_(slots, given, alpha=1 / divisor)
            return
        if not self._has_zeros:
            # By the same call: on an accelerator it is one kernel.
            gaps = self.buffer.gaps()
            slots.extend(gaps)
            given.extend(self._zeros_for(gaps, given[0].dtype))
            self._has_zeros = True
        torch._foreach_copy_(slots, given)
        if divisor != 1.0:
            torch._foreach_div_(batch.stretches, divisor)

    def _zeros_for(self, gaps: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """For each gap as many zeros, of `dtype`."""
        zeros = self._zeros.get(dtype)
        if zeros is None:
            longest = max((gap.numel() for gap in gaps), default=0)
            some = torch.zeros(longest, dtype=dtype, device=self.buffer.tensor.device)
            zeros = self._zeros[dtype] = [some[: gap.numel()] for gap in gaps]
        return zeros

    def _batch(self, indices: tuple[int, ...]) -> _Batch:
        if indices not in self._batches:
            self._batches[indices] = _Batch.of(self.buffer, indices)
        return self._batches[indices]

    def open(self) -> None:
        """Allocate the buffer if it is not allocated."""
        self.buffer.allocate()
        if not self._slots:
            self._slots = self.buffer.views()

    def complete(self) -> torch.Tensor:
        """Return the flat gradient, 1-D, `layout.numel` elements, ready to reduce; slots without a deposit are zero.

        The memory stays with the ledger until `release`.
        """
        if self._kept:
            self.collect()
        if not (self._has_zeros and all(self.deposited)):
            self.open()
            missing = [slot for slot, arrived in zip(self._slots, self.deposited, strict=True) if not arrived]
            missing.extend(() if self._has_zeros else self.buffer.gaps())
            # torch refuses an empty list.
            if missing:
                torch._foreach_zero_(missing)
            self._has_zeros = True
        return self.buffer.tensor

    def joined(self) -> torch.Tensor:
        """Return what `complete` does, as the shards of all ranks end to end, if each rank has chunks.

        Gradients that are still where autograd left them are copied once.
        """
        chunks = self.buffer.layout.chunks
        if not (self._kept and self.is_apart):
            return chunks.joined(self.complete())
        parts = self._hand_over()
        self.buffer.allocate()
        chunks.join(parts, self.buffer.tensor)
        return self.buffer.tensor

    def release(self) -> None:
        """Drop every gradient and free the memory, once the reduction has read it."""
        self.deposited[:] = self._turns[:] = bytes(len(self.deposited))
        self._kept.clear()
        self._has_zeros = False
        self.buffer.free()

    def drop(self, indices: Iterable[int]) -> None:
        """Drop the gradients of parameters `indices`, as if none had arrived since the last release."""
        for index in indices:
            self._kept.pop(index, None)
            self.deposited[index] = 0
        # The next gradient of each has its turn with the others'.
        turn = next((self._turns[index] ^ (index in self._kept) for index, _ in self.arrived()), 0)
        for index, arrived in enumerate(self.deposited):
            if not arrived and index not in self._kept:
                self._turns[index] = turn
        if self.is_empty:
            self.release()

    def give_away(self) -> torch.Tensor:
        """Return `complete()`, whose memory belongs to the caller from now on; `release` drops the gradients."""
        full = self.complete()
        self.buffer.give_away()
        self._slots = ()
        self._batches.clear()
        self._has_zeros = False
        return full

    def slot(self, index: int) -> torch.Tensor:
        """Return the accumulated gradient of parameter `index`, in its shape.

        Raises:
            FlatParamError: if none has arrived.
        """
        self._collect_kept([index])
        if not self.deposited[index]:
            raise FlatParamError(f"no gradient of {self.buffer.layout.fqns[index]!r} has arrived")
        return self._slots[index]


def add_to_grad(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add `gradient` (the parameter's shape) to `.grad`, which takes its dtype."""
    if parameter.grad is not None:
        parameter.grad += gradient
        return
    if gradient.dtype != parameter.dtype and parameter.grad_dtype not in (None, gradient.dtype):
        # Any dtype: the program may cast the gradient before an optimizer steps.
        parameter.grad_dtype = None
    parameter.grad = gradient
