"""The settings that a unit gets when it is made: a sharding strategy is resolved into them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias, final

import attrs
import torch

from flatparam_comm import Precision, Topology
from flatparam_comm.transfer.gather import OwnGather
from flatparam_comm.transfer.reduction import Sums
from flatparam_runtime.agreement.nonfinite import Nonfinite, check_nonfinite

BufferDtype: TypeAlias = "torch.dtype | Callable[[str, torch.Tensor], torch.dtype | None] | None"
"""The dtype of floating-point buffers while training: one for all, or a function of name and buffer."""


class BackwardOrder(enum.Enum):
    """The time to gather the next unit of the backward pass; FSDP1's BACKWARD_PRE, BACKWARD_POST and None."""

    BEFORE_COMPUTE = "before this unit's gradients are computed: most overlap"
    AFTER_COMPUTE = "after this unit's full parameters are freed: least memory"
    NEVER = "when the next unit needs it"


@final
@attrs.frozen
class PrefetchPlan:
    """The number of units to gather ahead; 0 gathers each unit when it is needed.

    In the forward pass `None` lets the device decide. The CPU gathers each unit when it is needed, since the same
    cores copy and compute. An accelerator gathers the next unit in the background. There, more units than this number
    are gathered ahead, as long as all gathered units that wait to be used have at most `runtime.prefetch_nbytes`.
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
    """The casts of the floating-point tensors that a unit's module takes.

    Attributes:
        dtype: the dtype that inputs are cast to; `None` casts nothing.
        at_root: whether the outermost unit of a pass casts.
        below_root: whether a unit with parameters casts, also inside another.
        restores_outputs: cast floating-point outputs back to the dtype that the inputs had.
        without_parameters: whether a unit below the root casts even if it has no parameters of its own.
        output_dtype: the dtype that floating-point outputs are cast to, in any call; `None` casts none.
    """

    dtype: torch.dtype | None = None
    at_root: bool = True
    below_root: bool = False
    restores_outputs: bool = False
    without_parameters: bool = False
    output_dtype: torch.dtype | None = None

    def applies(self, *, is_top: bool, manages: bool = True) -> bool:
        """Return whether a call casts its inputs.

        Args:
            is_top: the call is the outermost of its pass.
            manages: the unit has parameters.
        """
        below_root = self.below_root and (manages or self.restores_outputs or self.without_parameters)
        return self.dtype is not None and (below_root or (self.at_root and is_top))


@final
@attrs.frozen
class UnitPlan:
    """The settings of a unit: the ranks that share its parameters, and how it gathers, casts, frees and reduces.

    Attributes:
        topology: the ranks over which parameters are sharded, and those that hold copies.
        free_after_forward: free the full parameters between the forward and the backward pass.
        keeps_outermost: do not free those of the unit whose forward call is the outermost, whatever
            `free_after_forward` says: backward begins with that unit.
        keeps_last: do not free those of the unit that is expected to end last, as in the previous pass: backward needs
            them first, so they would be gathered twice in a row.
        free_after_unsynced_backward: free the full parameters after a backward pass inside `no_sync` too.
        unshards_in_backward: gather the full parameters for the backward pass; otherwise nothing in that pass may read
            them, as in an embedding.
        full_precision_in_eval: compute in the parameters' own dtype while the module is in `eval()`.
        storage_device: the device of the shards between steps; `None` is the device of the full parameters.
        notices_replacement: detect, at each gather, whether the user has given a parameter different data.
        overlaps_reductions: compute the gradients of a unit while those of the unit before are reduced, which takes
            memory for one more unit's gradients; `None` does so on an accelerator only, since on the CPU the same cores
            add, copy and compute.
        broadcast_buffers: start each training forward of the root with rank 0's buffers.
        nonfinite: what follows if a gradient is infinite or not a number, on any rank: `"raise"` an error on every
            rank, `"skip"` the optimizer's step on every rank, or `"ignore"` it. The strictest unit of a tree decides.
        sums: how gradients are summed; `None`: by the backend.
        gathers: how full parameters are gathered to compute with; `None`: as they are, from all ranks.
    """

    topology: Topology
    free_after_forward: bool = True
    free_after_unsynced_backward: bool = True
    unshards_in_backward: bool = True
    prefetch: PrefetchPlan = PrefetchPlan()
    precision: Precision = attrs.field(factory=Precision)
    casting: Casting = Casting()
    buffer_dtype: BufferDtype = None
    full_precision_in_eval: bool = False
    storage_device: torch.device | None = None
    notices_replacement: bool = True
    broadcast_buffers: bool = False
    keeps_outermost: bool = True
    keeps_last: bool = False
    overlaps_reductions: bool | None = True
    use_orig_params: bool = False
    nonfinite: Nonfinite = attrs.field(default="ignore", converter=check_nonfinite)
    sums: Sums | None = attrs.field(default=None, eq=False)
    gathers: OwnGather | None = attrs.field(default=None, eq=False)

    def __attrs_post_init__(self) -> None:
        for name, kind in (("topology", Topology), ("precision", Precision), ("prefetch", PrefetchPlan)):
            found = getattr(self, name)
            if not isinstance(found, kind):
                raise TypeError(f"UnitPlan: expected a {kind.__name__} as {name}, found {found!r}")
