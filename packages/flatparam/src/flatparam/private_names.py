"""FSDP1's names with an underscore that programs in the wild reach for, with what they mean there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from typing import Any

import attrs
from torch import nn
from typing_extensions import final

from flatparam.training_state import HandleTrainingState, TrainingState, UnshardHandle
from flatparam_core import FlatParameter, FlatParamHandle
from flatparam_runtime import Unit, tree_of

__all__ = ["WithPrivateNames"]

_LOGGER = logging.getLogger(__name__)


class WithPrivateNames(nn.Module):
    """What `FullyShardedDataParallel` has of FSDP1's private names; it is not used by itself."""

    _unit: Unit
    _reported: tuple[TrainingState, HandleTrainingState] | None = None

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.handles)

    @property
    def _handle(self) -> FlatParamHandle | None:
        return self._unit.handles[0] if self._unit.handles else None

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self._handle.flat_param if self._handle else None

    @property
    def _is_root(self) -> bool:
        return tree_of(self._unit).root is self._unit

    @property
    def _exec_order_data(self) -> ExecutionOrder:
        return ExecutionOrder(tree_of(self._unit).units)

    @property
    def training_state(self) -> TrainingState:
        """What the wrapper is doing."""
        return TrainingState.of(self._unit) if self._reported is None else self._reported[0]

    @property
    def _handle_training_state(self) -> HandleTrainingState:
        return HandleTrainingState.of(self._unit) if self._reported is None else self._reported[1]

    def _assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise ValueError where the wrapper is doing something else; rank 0 logs it too."""
        expected = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in expected:
            message = f"unit {self._unit.name!r}: expected to be in {expected}, found {self.training_state}"
            if self._unit.plan.topology.group.rank == 0:
                _LOGGER.error("%s: %s", message, self)
            raise ValueError(message)

    @contextlib.contextmanager
    def _use_training_state(
        self, training_state: TrainingState, handle_training_state: HandleTrainingState
    ) -> Generator[None, None, None]:
        """Have `training_state` and `_assert_state` tell these inside; what a unit does follows from its own phase."""
        before, self._reported = self._reported, (training_state, handle_training_state)
        try:
            yield
        finally:
            self._reported = before

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Start to gather this unit's full parameters; returns what to wait for, with `async_op`."""
        self._unit.begin_unshard()
        handle = UnshardHandle(self._unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Nothing to wait for: every gather is ordered before its use by the pending value that started it."""


@final
@attrs.define(eq=False)
class ExecutionOrder:
    """How far ahead the units of one tree are gathered; programs set the two limits."""

    _units: Sequence[Unit]

    @property
    def _forward_prefetch_limit(self) -> int:
        return max(self._units[0].plan.prefetch.forward or 0, 1)

    @_forward_prefetch_limit.setter
    def _forward_prefetch_limit(self, limit: int) -> None:
        for unit in self._units:
            if unit.plan.prefetch.forward:  # where `forward_prefetch` was asked for
                self._change(unit, forward=limit)

    @property
    def _backward_prefetch_limit(self) -> int:
        return self._units[0].plan.prefetch.backward_depth

    @_backward_prefetch_limit.setter
    def _backward_prefetch_limit(self, limit: int) -> None:
        for unit in self._units:
            self._change(unit, backward_depth=limit)

    @staticmethod
    def _change(unit: Unit, **limits: Any) -> None:
        unit.change_prefetch(**limits)
