"""This rank's part of a flat parameter, wherever the user has put it; and a tensor that gets other memory."""

from __future__ import annotations

from typing import final

import attrs
import torch
from typing_extensions import Self

from flatparam_core.errors import FlatParamError
from flatparam_core.flat_parameter import FlatParameter


@final
@attrs.define(eq=False)
class Shard:
    """The memory of a flat parameter as it was last seen; the flat parameter has the layout and the rank."""

    flat_param: FlatParameter
    values: torch.Tensor
    """The flat parameter, detached."""
    moves: int = 0
    """The number of times that the flat parameter was given other memory."""
    address: int = -1
    """The address of the memory."""
    device: torch.device = attrs.Factory(lambda self: self.flat_param.device, takes_self=True)

    @classmethod
    def of(cls, flat_param: FlatParameter) -> Self:
        """Return the memory of `flat_param` as it is now."""
        return cls(flat_param, flat_param.detach(), address=flat_param.data_ptr())

    @property
    def is_another_kind(self) -> bool:
        """Whether the flat parameter has a different dtype, or is on a different device, than when it was last seen."""
        flat_param = self.flat_param
        return flat_param.dtype != flat_param.flat_layout.dtype or flat_param.device != self.device

    def check_shape(self, who: object) -> None:
        """Check that the data that the flat parameter was given fit its layout; `str(who)` names it in the message.

        Raises:
            FlatParamError: if their shape is different.
        """
        expected = (self.flat_param.flat_layout.shard_span(self.flat_param.rank).numel,)
        if self.flat_param.shape != expected:
            raise FlatParamError(
                f"{who} was given other data: expected shape {expected}, found {tuple(self.flat_param.shape)}"
            )

    def follow(self) -> None:
        """Take over the memory, the device and the dtype that the flat parameter has now."""
        flat_param = self.flat_param
        self.values, self.address, self.device = (flat_param.detach(), flat_param.data_ptr(), flat_param.device)
        self.moves += 1
        flat_param.flat_layout = flat_param.flat_layout.with_dtype(flat_param.dtype)

    def write(self, values: torch.Tensor) -> None:
        """Copy `values`, on any device, to the shard if they differ: equal values do not count as a change."""
        own = values.to(self.flat_param.device)
        if not torch.equal(own, self.values):
            self.flat_param.detach().copy_(own)


def give_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Make `tensor` use the memory of `data`, of any shape, dtype and device; it keeps its class and its attributes.

    Raises:
        RuntimeError: if torch cannot put the memory of one device under a tensor of a different one (an accelerator
            that is registered as `PrivateUse1` beside the CPU), and something has a weak reference to `tensor`.
    """
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    other = torch.Tensor._make_subclass(type(tensor), data.detach(), tensor.requires_grad)
    other.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
