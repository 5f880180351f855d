"""FSDP1's names with an underscore that programs in the wild reach for, with what they mean there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

import flatparam_runtime as runtime
from flatparam.wrapper import prefetching, ranks, refusing, reporting
from flatparam.wrapper.handle import HandleView, handle_views
from flatparam.wrapper.interior import Interior, wrappers_in
from flatparam.wrapper.training_state import HandleTrainingState, TrainingState, UnshardHandle
from flatparam_core import FlatParameter

__all__ = ["PrivateNames"]


class PrivateNames(nn.Module):
    """A wrapper as those programs see it; `flatparam.FullyShardedDataParallel` is the only one."""

    _interior: Interior

    @property
    def _unit(self) -> runtime.Unit:
        return self._interior.unit

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.handles)

    @property
    def _handle(self) -> HandleView | None:
        return next(iter(handle_views([self._unit])), None)

    @property
    def _all_handles(self) -> list[HandleView]:
        """The handles of the wrappers in the model around this one, as far as any pass has shown it."""
        return handle_views(runtime.tree_of(self._unit).units)

    @property
    def _all_fsdp_states(self) -> list[PrivateNames]:
        """This wrapper and those inside."""
        return [wrapper for wrapper in wrappers_in(self) if isinstance(wrapper, PrivateNames)]

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self._unit.handles[0].flat_param if self._unit.handles else None

    @property
    def _use_orig_params(self) -> bool:
        return self._unit.plan.use_orig_params

    @property
    def _is_root(self) -> bool:
        return runtime.tree_of(self._unit).root is self._unit

    @_is_root.setter
    def _is_root(self, is_root: bool | None) -> None:
        """Do nothing. FSDP1 remembers the root; here each pass finds it, so to read it tells what is."""

    @property
    def _inter_node_pg(self) -> Any:
        """The ranks that hold copies of this rank's shard; only the hybrid strategies have any."""
        return ranks.copies(self._unit)

    @property
    def _device_handle(self) -> Any:
        """Torch's module of the device that the unit computes on: `torch.cuda`, `torch.cpu`, and so on."""
        return torch.get_device_module(self._unit.device)

    @property
    def _current_stream(self) -> Any:
        """The current stream of the device: whatever we do elsewhere is ordered before its use in this one."""
        return self._device_handle.current_stream()

    _default_stream = _unshard_stream = _pre_unshard_stream = _current_stream
    _post_backward_stream = _all_reduce_stream = _current_stream

    @property
    def _exec_order_data(self) -> prefetching.PrefetchLimits:
        return prefetching.PrefetchLimits(runtime.tree_of(self._unit).units)

    @property
    def _handle_training_state(self) -> HandleTrainingState:
        return reporting.handle_state_of(self._interior)

    def _assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise ValueError if the wrapper is doing something else; rank 0 logs it too."""
        reporting.check_state(self, self._interior, state)

    def _use_training_state(
        self, training_state: TrainingState, handle_training_state: HandleTrainingState
    ) -> AbstractContextManager[None]:
        """Have `training_state` and `_assert_state` tell these inside; what a unit does follows from its own phase."""
        return reporting.reporting(self._interior, training_state, handle_training_state)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Start to gather this unit's full parameters; returns what to wait for, with `async_op`."""
        handle = UnshardHandle.begin(self._unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Nothing to wait for: every gather is ordered before its use by the pending value that started it."""

    _fqn_modifiers = refusing.refuse_torchs_functions
    _ddp_params_and_buffers_to_ignore = refusing.DDP_ASKS
    _is_fsdp_managed_module = refusing.FSDP_MARKS
