"""How far ahead units are gathered, as FSDP1's private names have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import attrs

from flatparam_runtime import Unit

__all__ = ["PrefetchLimits"]


@final
@attrs.define(eq=False)
class PrefetchLimits:
    """How far ahead the units of one tree are gathered; programs set the two limits, which have FSDP1's names."""

    _units: Sequence[Unit]

    @property
    def _forward_prefetch_limit(self) -> int:
        return max(self._units[0].plan.prefetch.forward or 0, 1)

    @_forward_prefetch_limit.setter
    def _forward_prefetch_limit(self, limit: int) -> None:
        for unit in self._units:
            # Units whose wrapper did not ask for `forward_prefetch` stay as they are.
            if unit.plan.prefetch.forward:
                _change(unit, forward=limit)

    @property
    def _backward_prefetch_limit(self) -> int:
        return self._units[0].plan.prefetch.backward_depth

    @_backward_prefetch_limit.setter
    def _backward_prefetch_limit(self, limit: int) -> None:
        for unit in self._units:
            _change(unit, backward_depth=limit)


def _change(unit: Unit, **changes: Any) -> None:
    unit.change_plan(prefetch=attrs.evolve(unit.plan.prefetch, **changes))
