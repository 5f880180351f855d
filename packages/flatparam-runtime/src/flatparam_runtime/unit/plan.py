"""What a unit is told once, when it is made: the answers that a sharding strategy comes down to."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias

import attrs
import torch
from typing_extensions import final

from flatparam_comm import Precision, Topology

__all__ = ["BackwardOrder", "BufferDtype", "Casting", "PrefetchPlan", "UnitPlan"]

BufferDtype: TypeAlias = "torch.dtype | Callable[[str, torch.Tensor], torch.dtype | None] | None"
"""The dtype of floating-point buffers while training: one for all, or asked for each by name (`None` leaves it)."""


class BackwardOrder(enum.Enum):
    """When the gather for the next unit of the backward pass starts; FSDP1's BACKWARD_PRE, BACKWARD_POST and None."""

    BEFORE_COMPUTE = "before this unit's gradients are computed: most overlap"
    AFTER_COMPUTE = "after this unit's full parameters are freed: least memory"
    NEVER = "when the next unit needs it"


@final
@attrs.frozen
class PrefetchPlan:
    """How far ahead full parameters are gathered, in units; 0 gathers each when it is needed.

    In the forward pass `None` leaves it to the device. The CPU gathers each unit when it is needed, since the same
    cores copy and compute. On an accelerator the next unit is gathered beside the computing. There, units after the
    first so many are gathered ahead too, as long as all that wait to be used are no more than
    `runtime.prefetch_nbytes`.
    """

    forward: int | None = None
    backward: BackwardOrder = BackwardOrder.BEFORE_COMPUTE
    backward_depth: int = 1

    def __attrs_post_init__(self) -> None:
        if self.forward is not None and self.forward < 0:
            raise ValueError(f"expected a forward prefetch depth of at least 0, found {self.forward}")
        if self.backward_depth < 1:
            raise ValueError(f"expected a backward prefetch depth of at least 1, found {self.backward_depth}")


@final
@attrs.frozen
class Casting:
    """What becomes of the floating-point tensors that a unit's module takes.

    Attributes:
        dtype: what they are cast to; `None` casts nothing.
        at_root: whether the outermost unit of a pass casts.
        below_root: whether a unit with parameters casts, also inside another.
        restores_outputs: cast floating-point outputs back to the dtype that the inputs had.
    """

    dtype: torch.dtype | None = None
    at_root: bool = True
    below_root: bool = False
    restores_outputs: bool = False

    def applies(self, *, is_top: bool, manages: bool = True) -> bool:
        """Whether a call casts its inputs; `is_top`: it is the outermost of its pass; `manages`: it has parameters."""
        below_root = self.below_root and (manages or self.restores_outputs)
        return self.dtype is not None and (below_root or (self.at_root and is_top))


@final
@attrs.frozen
class UnitPlan:
    """Where a unit's parameters are sharded, and when its full parameters are freed.

    Attributes:
        topology: the ranks over which parameters are sharded, and those that hold copies.
        free_after_forward: free the full parameters between the forward and the backward pass.
        keeps_last: but not those of the unit that ends last, as in the pass before: backward needs them first, so they
            would be gathered twice in a row.
        free_after_unsynced_backward: free them after a backward pass inside `no_sync` too.
        full_precision_in_eval: compute in the parameters' own dtype while the module is in `eval()`.
        storage_device: where the shards live between steps; `None`: where the full parameters do.
        notices_replacement: look, at each gather, whether the user has given a parameter other data.
        overlaps_reductions: compute the gradients of a unit while those of the unit before are reduced, which takes the
            memory of one unit's gradients more; `None`: on an accelerator only, since on the CPU the same cores add,
            copy and compute.
        broadcast_buffers: start each training forward of the root from rank 0's buffers.
    """

    topology: Topology
    free_after_forward: bool = True
    free_after_unsynced_backward: bool = True
    prefetch: PrefetchPlan = PrefetchPlan()
    precision: Precision = attrs.field(factory=Precision)
    casting: Casting = Casting()
    buffer_dtype: BufferDtype = None
    full_precision_in_eval: bool = False
    storage_device: torch.device | None = None
    notices_replacement: bool = True
    broadcast_buffers: bool = False
    keeps_last: bool = False
    overlaps_reductions: bool | None = True
    use_orig_params: bool = False
