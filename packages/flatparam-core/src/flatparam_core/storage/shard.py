"""This rank's part of a flat parameter, wherever the user has put it."""

from __future__ import annotations

import attrs
import torch
from typing_extensions import Self, final

from flatparam_core.errors import FlatParamError
from flatparam_core.flat_parameter import FlatParameter

__all__ = ["Shard"]


@final
@attrs.define(eq=False)
class Shard:
    """The memory of a flat parameter as it was seen last; the flat parameter has the layout and the rank."""

    flat_param: FlatParameter
    values: torch.Tensor
    """The flat parameter, detached."""
    moves: int = 0
    """How often it was given other memory."""
    _address: int = -1
    device: torch.device = attrs.field(init=False)

    @device.default
    def _where_it_is(self) -> torch.device:
        return self.flat_param.device

    @classmethod
    def of(cls, flat_param: FlatParameter) -> Self:
        """Where `flat_param` is now."""
        return cls(flat_param, flat_param.detach(), address=flat_param.data_ptr())

    @property
    def has_moved(self) -> bool:
        """Whether somebody has given the flat parameter other memory since it was seen last."""
        return self.flat_param.data_ptr() != self._address

    @property
    def is_another_kind(self) -> bool:
        """Whether the flat parameter has another dtype, or is on another device, than when it was seen last."""
        flat_param = self.flat_param
        return flat_param.dtype != flat_param.flat_layout.dtype or flat_param.device != self.device

    def check_shape(self, who: object) -> None:
        """Make sure that what the flat parameter was given fits its layout; `str(who)` names it in the message.

        Raises:
            FlatParamError: if it has another shape.
        """
        expected = (self.flat_param.flat_layout.shard_numel,)
        if self.flat_param.shape != expected:
            raise FlatParamError(
                f"{who} was given other data: expected shape {expected}, found {tuple(self.flat_param.shape)}"
            )

    def follow(self) -> None:
        """Look at the memory, and the dtype, that the flat parameter has now."""
        flat_param = self.flat_param
        self.values, self._address, self.device = (
            flat_param.detach(),
            flat_param.data_ptr(),
            flat_param.device,
        )
        self.moves += 1
        flat_param.flat_layout = flat_param.flat_layout.with_dtype(flat_param.dtype)

    def write(self, values: torch.Tensor) -> None:
        """Take `values` over, on any device, if they differ: a shard that has not changed counts as unchanged."""
        own = values.to(self.flat_param.device)
        if not torch.equal(own, self.values):
            self.flat_param.detach().copy_(own)
