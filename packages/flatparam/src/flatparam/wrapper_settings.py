"""What a wrapper was asked for and follows, under FSDP1's names; setting one of them counts from the next pass on."""

from __future__ import annotations

from typing import Any

from torch import nn

from flatparam.api import BackwardPrefetch
from flatparam.resolve import backward_prefetch_of, resolve_prefetch
from flatparam_runtime import Unit

__all__ = ["WithSettings"]


class WithSettings(nn.Module):
    """What `FullyShardedDataParallel` tells of its settings; it is not used by itself."""

    _unit: Unit
    limit_all_gathers: bool

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When the next unit of the backward pass is gathered."""
        return backward_prefetch_of(self._unit.plan.prefetch)

    @backward_prefetch.setter
    def backward_prefetch(self, when: Any) -> None:
        self._prefetch(backward=resolve_prefetch(False, when).backward)

    @property
    def forward_prefetch(self) -> int:
        """Whether the next unit is gathered in the forward pass, by every device; how many, if more than one.

        On an accelerator units are gathered ahead without it, too.
        """
        units = self._unit.plan.prefetch.forward or 0
        return units if units > 1 else bool(units)

    @forward_prefetch.setter
    def forward_prefetch(self, units: int) -> None:
        self._prefetch(forward=int(units) or None)

    def _prefetch(self, **changes: Any) -> None:
        self._unit.change_prefetch(**changes)
