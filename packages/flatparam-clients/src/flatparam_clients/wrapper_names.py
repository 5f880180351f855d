"""FSDP1's names of a wrapper that programs in the wild reach for, with what they mean there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

import flatparam_runtime as runtime
from flatparam import FullyShardedDataParallel, UnshardHandle
from flatparam.api import OptimStateDictConfig, StateDictConfig, StateDictType
from flatparam.wrapper import interior
from flatparam_clients import older_functions, rekeying, reporting
from flatparam_clients.handle import HandleView, handle_views
from flatparam_clients.prefetch_limits import PrefetchLimits
from flatparam_clients.training_state import HandleTrainingState, TrainingState
from flatparam_core import FlatParameter

__all__ = ["NAMES"]


class _WrapperNames(FullyShardedDataParallel):
    """Holds the attributes that the wrapper's class takes from here, one by one, when a program asks for them."""

    # The older methods for optimizer state

    full_optim_state_dict = staticmethod(older_functions.full_optim_state_dict)
    """Use `optim_state_dict` instead. The full state by parameter name, in CPU memory."""
    sharded_optim_state_dict = staticmethod(older_functions.sharded_optim_state_dict)
    """Use `optim_state_dict` instead. The sharded state by parameter name."""
    shard_full_optim_state_dict = staticmethod(older_functions.shard_full_optim_state_dict)
    """Use `optim_state_dict_to_load` instead. This rank's part of a full state that every rank passes."""
    scatter_full_optim_state_dict = staticmethod(older_functions.scatter_full_optim_state_dict)
    """Use `optim_state_dict_to_load` instead. This rank's part of the first rank's full state."""
    flatten_sharded_optim_state_dict = staticmethod(older_functions.flatten_sharded_optim_state_dict)
    """Use `optim_state_dict_to_load` instead. This rank's part of a sharded state."""
    rekey_optim_state_dict = staticmethod(rekeying.rekey_optim_state_dict)
    """A full optimizer state by name, with an ordinary optimizer's numbers as keys; or, of one by number, names."""

    # Names with an underscore, and one without

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
    def _all_fsdp_states(self) -> list[FullyShardedDataParallel]:
        """This wrapper and those inside."""
        return FullyShardedDataParallel.fsdp_modules(self)

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self._unit.handles[0].flat_param if self._unit.handles else None

    @property
    def _use_orig_params(self) -> bool:
        return self._unit.plan.use_orig_params

    @property
    def _sync_gradients(self) -> bool:
        """Whether the next backward pass reduces gradients; `no_sync` sets it for all wrappers of a model."""
        return self._unit.reducer.synchronises

    @_sync_gradients.setter
    def _sync_gradients(self, synchronises: bool) -> None:
        self._unit.reducer.synchronises = synchronises

    @property
    def _comm_hook(self) -> Callable[..., Any] | None:
        """The hook in the place of the reduction, if there is one; `_comm_hook_state` is its state."""
        return self._unit.reducer.hooks.given("reduce")[0]

    @property
    def _comm_hook_state(self) -> Any:
        return self._unit.reducer.hooks.given("reduce")[1]

    @property
    def _state_dict_type(self) -> StateDictType:
        return self._interior.settings.state_dict_type

    @property
    def _state_dict_config(self) -> StateDictConfig:
        return self._interior.settings.state_dict_config

    @property
    def _optim_state_dict_config(self) -> OptimStateDictConfig:
        return self._interior.settings.optim_state_dict_config

    @property
    def _inter_node_pg(self) -> Any:
        """The ranks that hold copies of this rank's shard; only the hybrid strategies have any."""
        return interior.copies(self._unit)

    @property
    def _device_handle(self) -> Any:
        """Torch's module of the device that the unit computes on: `torch.cuda`, `torch.cpu`, and so on."""
        return torch.get_device_module(self.compute_device)

    @property
    def _current_stream(self) -> Any:
        """The current stream of the device: whatever we do elsewhere is ordered before its use in this one."""
        return self._device_handle.current_stream()

    _default_stream = _unshard_stream = _pre_unshard_stream = _current_stream
    _post_backward_stream = _all_reduce_stream = _current_stream

    @property
    def _exec_order_data(self) -> PrefetchLimits:
        return PrefetchLimits(runtime.tree_of(self._unit).units)

    @property
    def training_state(self) -> TrainingState:
        """The state of the wrapper."""
        return reporting.state_of(self._interior)

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


NAMES: Final[Mapping[str, Any]] = {
    name: value for name, value in vars(_WrapperNames).items() if not name.startswith("__")
}
"""The attributes by name, as the class has them."""
