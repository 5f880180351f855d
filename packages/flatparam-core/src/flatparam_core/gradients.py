"""Where the gradients of a unit's parameters wait, in one flat buffer, until they are reduced."""

from __future__ import annotations

import attrs
import torch
from typing_extensions import Self, final

from flatparam_core.buffer import FlatBuffer
from flatparam_core.errors import FlatParamError
from flatparam_core.layout import FlatLayout

__all__ = ["GradientLedger"]


@final
@attrs.define(eq=False)
class GradientLedger:
    """The unsharded gradients of one flat parameter since the last reduction, summed, in the reduction dtype.

    Each gradient is copied once, with its cast and its averaging factor, straight to its slot. Invariant: the buffer is
    allocated exactly while some slot was deposited or the buffer is out for reduction.
    """

    buffer: FlatBuffer
    deposited: bytearray
    """One byte per parameter: 1 where a gradient has arrived since the last release."""
    _slots: tuple[torch.Tensor, ...] = ()

    @classmethod
    def create(cls, layout: FlatLayout, *, dtype: torch.dtype, device: torch.device) -> Self:
        """An empty ledger; it takes no memory until the first deposit."""
        return cls(FlatBuffer.create(layout, dtype=dtype, device=device), bytearray(len(layout.slots)))

    @property
    def is_full(self) -> bool:
        """Whether a gradient of every parameter has arrived since the last release."""
        return all(self.deposited)

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has arrived since the last release."""
        return not any(self.deposited)

    def deposit(self, index: int, gradient: torch.Tensor, *, divisor: float = 1.0) -> None:
        """Add `gradient / divisor` to the slot of parameter `index`.

        Args:
            index: the parameter's place in the layout.
            gradient: shape of the parameter, any floating or complex dtype that casts to the ledger's.
            divisor: a power of two loses nothing; the averaging factor before the reduction.
        """
        self.open()
        slot = self._slots[index]
        gradient = gradient.detach()
        if (
            divisor != 1.0
        ):  # divided in the wider dtype: a half-precision gradient must not underflow before its cast
            gradient = gradient.to(torch.promote_types(gradient.dtype, slot.dtype))
        if self.deposited[index]:
            slot.add_(gradient if divisor == 1.0 else gradient / divisor)
        else:
            if divisor == 1.0:
                slot.copy_(gradient)
            else:
                torch.div(gradient, divisor, out=slot)
            self.deposited[index] = 1

    def open(self) -> None:
        """Allocate the buffer where it is not."""
        if not self.buffer.is_allocated:
            self.buffer.allocate()
        if not self._slots:
            self._slots = self.buffer.views()

    def complete(self) -> torch.Tensor:
        """The flat gradient, 1-D, `layout.numel` elements, ready to reduce: what nothing was deposited in is zero.

        The memory stays with the ledger until `release`.
        """
        self.open()
        for index, arrived in enumerate(self.deposited):
            if not arrived:
                self._slots[index].zero_()
        self.buffer.zero_gaps()
        return self.buffer.tensor

    def release(self) -> None:
        """Forget every gradient and free the memory, once the reduction has read it."""
        self.deposited[:] = bytes(len(self.deposited))
        self.buffer.free()

    def slot(self, index: int) -> torch.Tensor:
        """The accumulated gradient of parameter `index`, in its shape.

        Raises:
            FlatParamError: where none has arrived.
        """
        if not self.deposited[index]:
            raise FlatParamError(f"no gradient of {self.buffer.layout.fqns[index]!r} has arrived")
        return self._slots[index]
