"""FSDP1's names of a wrapper that programs in the wild reach for, with what they mean there."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import nn

import flatparam_runtime as runtime
from flatparam import FullyShardedDataParallel, UnshardHandle
from flatparam.api import OptimStateDictConfig, StateDictConfig, StateDictType
from flatparam.wrapper.interior import Interior, copies
from flatparam_clients import older_functions
from flatparam_clients.handle_view import HandleTrainingState, HandleView, TrainingState, handle_views
from flatparam_comm import warn_caller
from flatparam_core import FlatParameter
from flatparam_runtime import Unit


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
    rekey_optim_state_dict = staticmethod(older_functions.rekey_optim_state_dict)
    """A full optimizer state by name, with an ordinary optimizer's numbers as keys; or, of one by number, names."""

    # Names with an underscore, and one without

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.handles)

    @property
    def _handle(self) -> HandleView | None:
        _warn_of_more(self._unit, "_handle")
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
        _warn_of_more(self._unit, "_flat_param")
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
        return copies(self._unit)

    @property
    def _device_mesh(self) -> Any:
        """Return the mesh that the wrapper was given, or None."""
        return self._unit.topology.mesh

    @property
    def _ignored_modules(self) -> set[nn.Module]:
        """Return the modules that are left whole, with all below them."""
        return {*self._interior.ignored}

    @property
    def _ignored_params(self) -> set[nn.Parameter]:
        """Return the parameters in the wrapped module that no unit holds."""
        inside = (each for each in self.module.parameters() if not isinstance(each, FlatParameter))
        return {each for each in inside if runtime.holder_of_parameter(each) is None}

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
        return state_of(self._interior)

    @property
    def _handle_training_state(self) -> HandleTrainingState:
        return handle_state_of(self._interior)

    def _assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise ValueError if the wrapper is doing something else; rank 0 logs it too."""
        check_state(self, self._interior, state)

    def _use_training_state(
        self, training_state: TrainingState, handle_training_state: HandleTrainingState
    ) -> AbstractContextManager[None]:
        """Have `training_state` and `_assert_state` tell these inside; what a unit does follows from its own phase."""
        return reporting(self._interior, training_state, handle_training_state)

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


_LOGGER = logging.getLogger("flatparam")
_REPORTED: Final[WeakKeyDictionary[Interior, tuple[TrainingState, HandleTrainingState]]] = WeakKeyDictionary()
"""The states that a program has a wrapper tell, instead of its own."""


def state_of(interior: Interior) -> TrainingState:
    """Return the wrapper's state, or the one that `reporting` has it tell."""
    return _REPORTED[interior][0] if interior in _REPORTED else TrainingState.of(interior.unit)


def _warn_of_more(unit: runtime.Unit, name: str) -> None:
    """Warn who takes one flat parameter of a unit for all of its parameters."""
    others = [fqn for handle in unit.handles[1:] for fqn in handle.layout.fqns]
    if others:
        warn_caller(
            f"{name} is the first of {len(unit.handles)} flat parameters of {unit}, and {others[0]!r} is in another: "
            "frozen parameters, and each dtype, have their own; _all_handles and params have all of them"
        )


def handle_state_of(interior: Interior) -> HandleTrainingState:
    """Return the state of the wrapper's flat parameters, or the one that `reporting` has it tell."""
    return _REPORTED[interior][1] if interior in _REPORTED else HandleTrainingState.of(interior.unit)


def check_state(wrapper: nn.Module, interior: Interior, state: TrainingState | Sequence[TrainingState]) -> None:
    """Make sure that the wrapper is in one of the states that are expected; otherwise rank 0 logs it, too.

    Raises:
        ValueError: naming the states.
    """
    expected = [state] if isinstance(state, enum.Enum) else list(state)
    found = state_of(interior)
    if found in expected:
        return
    unit = interior.unit
    message = f"unit {unit.name!r}: expected to be in {expected}, found {found}"
    if unit.topology.group.rank == 0:
        _LOGGER.error("%s: %s", message, wrapper)
    raise ValueError(message)


@contextlib.contextmanager
def reporting(interior: Interior, state: TrainingState, handle_state: HandleTrainingState) -> Iterator[None]:
    """Have the wrapper tell these states inside; what its unit does follows from the unit's own phase."""
    before = _REPORTED.get(interior)
    _REPORTED[interior] = state, handle_state
    try:
        yield
    finally:
        if before is None:
            del _REPORTED[interior]
        else:
            _REPORTED[interior] = before


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
