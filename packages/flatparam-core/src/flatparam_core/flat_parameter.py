"""The parameter that is one rank's shard of a flat parameter."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, final

import torch
from torch import nn
from torch.optim.optimizer import _foreach_supported_types

from flatparam_core.geometry import FlatLayout

if TYPE_CHECKING:
    from flatparam_core.handle import FlatParamHandle


@final
class FlatParameter(nn.Parameter):
    """This rank's shard, a 1-D leaf of `flat_layout.shard_numel` elements; an optimizer may hold it for ever.

    Its memory is never swapped: a gather fills a separate buffer. The names with a leading underscore are those of
    FSDP1's flat parameter, which checkpoint code reads.
    """

    flat_layout: FlatLayout
    rank: int
    _held_by: weakref.ReferenceType[FlatParamHandle] | None = None
    """A weak reference to the handle that it belongs to."""
    _is_flat_param = True
    _fsdp_flattened = True

    def __new__(cls, data: torch.Tensor, layout: FlatLayout, rank: int, requires_grad: bool) -> FlatParameter:
        """Build the parameter; see `__init__`."""
        parameter: FlatParameter = torch.Tensor._make_subclass(cls, data, requires_grad)
        parameter.flat_layout = layout
        parameter.rank = rank
        return parameter

    def __init__(self, data: torch.Tensor, layout: FlatLayout, rank: int, requires_grad: bool) -> None:
        """Take `data` (1-D, `flat_layout.shard_numel` elements) as the shard of `rank`; it is not copied."""

    def __deepcopy__(self, memo: dict[int, object]) -> FlatParameter:
        """A shard of the same layout with memory of its own, and without a gradient, as a copy of any parameter."""
        copied = type(self)(self.detach().clone(), self.flat_layout, self.rank, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return FlatParameter, (self.data, self.flat_layout, self.rank, self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor's takes a private keyword
        names = ", ".join(self.flat_layout.fqns[:3]) + (", ..." if len(self.flat_layout.fqns) > 3 else "")
        return (
            f"FlatParameter(rank {self.rank} of {self.flat_layout.world_size}, "
            f"{self.numel()} of {self.flat_layout.numel} elements, {self.dtype}, {self.device}: {names})"
        )

    @property
    def _fqns(self) -> tuple[str, ...]:
        return self.flat_layout.fqns

    @property
    def _shapes(self) -> tuple[torch.Size, ...]:
        return tuple(torch.Size(slot.spec.shape) for slot in self.flat_layout.slots)

    @property
    def _numels(self) -> tuple[int, ...]:
        return tuple(slot.spec.numel for slot in self.flat_layout.slots)


# torch steps many parameters in one call, which is faster on accelerators, only if it knows the class of each.
_foreach_supported_types.append(FlatParameter)
