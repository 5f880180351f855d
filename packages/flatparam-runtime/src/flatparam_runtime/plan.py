"""What a unit is told once, when it is made: the answers that a sharding strategy comes down to."""

from __future__ import annotations

import enum

import attrs
from typing_extensions import final

from flatparam_comm import Precision, Topology

__all__ = ["BackwardOrder", "PrefetchPlan", "UnitPlan"]


class BackwardOrder(enum.Enum):
    """When the gather for the next unit of the backward pass starts; FSDP1's BACKWARD_PRE, BACKWARD_POST and None."""

    BEFORE_COMPUTE = "before this unit's gradients are computed: most overlap"
    AFTER_COMPUTE = "after this unit's full parameters are freed: least memory"
    NEVER = "when the next unit needs it"


@final
@attrs.frozen
class PrefetchPlan:
    """How far ahead full parameters are gathered, in units; 0 gathers each when it is needed."""

    forward: int = 0
    backward: BackwardOrder = BackwardOrder.BEFORE_COMPUTE

    def __attrs_post_init__(self) -> None:
        if self.forward < 0:
            raise ValueError(f"expected a forward prefetch depth of at least 0, found {self.forward}")


@final
@attrs.frozen
class UnitPlan:
    """Where a unit's parameters are sharded, and when its full parameters are freed.

    Attributes:
        topology: the ranks over which parameters are sharded.
        free_after_forward: free the full parameters between the forward and the backward pass.
        free_after_unsynced_backward: free them after a backward pass inside `no_sync` too.
    """

    topology: Topology
    free_after_forward: bool = True
    free_after_unsynced_backward: bool = True
    prefetch: PrefetchPlan = PrefetchPlan()
    precision: Precision = attrs.field(factory=Precision)
    use_orig_params: bool = False
