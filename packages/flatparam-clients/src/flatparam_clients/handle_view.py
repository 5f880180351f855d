"""FSDP1's handle of a flat parameter, as programs reach for it, and its names for what a wrapper is doing."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, final
from weakref import WeakValueDictionary

import attrs
import torch
from torch import nn

from flatparam.compat import LikeTorchs
from flatparam.wrapper.interior import moving_shards, process_group, ranks_of
from flatparam_clients.flat_parameter_names import same_memory
from flatparam_core import FlatParamError, FlatParameter, FlatParamHandle, Residency
from flatparam_runtime import Phase, Unit


class TrainingState(LikeTorchs):
    """The state of a wrapper; the members are FSDP1's."""

    IDLE = enum.auto()
    FORWARD_BACKWARD = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()

    @classmethod
    def of(cls, unit: Unit) -> TrainingState:
        """Return the state of the wrapper of `unit`."""
        if unit.showing.wishes is not None or unit.phase is Phase.INSPECTING:
            return cls.SUMMON_FULL_PARAMS
        return cls.IDLE if unit.phase is Phase.IDLE else cls.FORWARD_BACKWARD


class HandleTrainingState(LikeTorchs):
    """The state of a flat parameter; the members are FSDP1's."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()

    @classmethod
    def of(cls, unit: Unit) -> HandleTrainingState:
        """Return the state of the flat parameters of `unit`."""
        if TrainingState.of(unit) is TrainingState.SUMMON_FULL_PARAMS:
            return cls.SUMMON_FULL_PARAMS
        if unit.phase is Phase.BACKWARD:
            return cls.BACKWARD_PRE if unit.residency is Residency.UNSHARDED else cls.BACKWARD_POST
        return {Phase.FORWARD: cls.FORWARD, Phase.REDUCING: cls.BACKWARD_POST}.get(unit.phase, cls.IDLE)


class _Sealed(type):
    """A class of which no method can be replaced."""

    def __setattr__(cls, name: str, value: Any) -> None:
        """Refuse.

        Raises:
            FlatParamError: naming what to call instead.
        """
        if name.startswith("__"):
            super().__setattr__(name, value)
            return
        raise FlatParamError(
            f"FlatParamHandle.{name} cannot be replaced, because the passes do not call it. To see or change what is "
            "gathered, register a hook on the model: register_comm_hook(state, hook, stage='all_gather')"
        )


@final
@attrs.define(eq=False)
class HandleView(metaclass=_Sealed):
    """A flat parameter's handle with FSDP1's names. Names that are not FSDP1's are those of our handle.

    Two views of one flat parameter are equal.
    """

    _unit: Unit
    _held: FlatParamHandle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HandleView) and other._held is self._held

    def __hash__(self) -> int:
        return hash(self._held)

    def __getattr__(self, name: str) -> Any:
        """Look `name` up in our handle."""
        return getattr(self._held, name)

    # Facts

    @property
    def flat_param(self) -> FlatParameter:
        """This rank's shard, which lives for ever."""
        return self._held.flat_param

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether several ranks share the flat parameter."""
        return not self._held.is_whole

    @property
    def process_group(self) -> Any:
        """The ranks that share it."""
        return process_group(self._unit)

    @property
    def world_size(self) -> int:
        """How many ranks share it."""
        return ranks_of(self._unit).size

    @property
    def _offload_params(self) -> bool:
        return self._unit.plan.storage_device is not None

    @property
    def _use_orig_params(self) -> bool:
        return self._unit.plan.use_orig_params

    @property
    def _fully_sharded_module(self) -> nn.Module:
        return self._unit.module

    @property
    def _training_state(self) -> HandleTrainingState:
        return HandleTrainingState.of(self._unit)

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        return self._held.layout.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        """Cast the flat parameter; the full ones keep the dtype that they had, and so does the reduction."""
        held, computed = self._held, self._held.forms.dtype(full_precision=False)
        held.take_over()  # The caller may have given it data of this dtype already.
        if dtype != held.layout.dtype:
            held.apply(lambda tensor: tensor.to(dtype))
        if computed != held.forms.dtype(full_precision=False):
            held.compute_in(computed)

    # Moving

    def flat_param_to(self, device: torch.device | str, non_blocking: bool = False) -> None:
        """Move the shard, the originals that are views of it, and their gradients to `device`, as `model.to` does.

        The unit computes there from then on. Call it outside of a pass; full parameters that are in memory are freed.
        A copy to the host is waited for in any case, since nothing else would before it is read.
        """
        runs_ahead = non_blocking and torch.device(device).type != "cpu"
        with moving_shards([self._unit], lambda tensor: tensor.to(device, non_blocking=runs_ahead)):
            pass

    # Full parameters

    def needs_unshard(self) -> bool:
        """Return whether the module does not show full parameters."""
        return not self._held.is_unsharded

    def unshard(self) -> None:
        """Gather the full parameters of the unit, if they are not in memory, and have the module show them."""
        self._unit.unshard()

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Free the unit's full parameters; the next pass gathers them.

        Also without `free_unsharded_flat_param`, because no full parameters are kept that no module shows.
        """
        self._unit.reshard()

    def _free_unsharded_flat_param(self) -> None:
        self._unit.reshard()

    def _alloc_padded_unsharded_flat_param(self) -> torch.Tensor:
        """Allocate the memory of the full parameters, without filling it; see `_use_unsharded_flat_param`."""
        if self._held.residency is Residency.SHARDED:
            self._held.reserve()
        return self._held.buffer.tensor

    def _all_gather_flat_param(self, padded_unsharded_flat_param: torch.Tensor) -> torch.Tensor:
        """Start to fill the memory that was allocated; returns it."""
        self._unit.begin_unshard()
        return self._held.buffer.tensor

    def _use_unsharded_flat_param(self, unsharded_flat_param: torch.Tensor) -> None:
        """Wait until the full parameters are there, and have the module show them.

        Raises:
            FlatParamError: if nobody has begun to gather them.
        """
        self._check_gathered("used")
        self._unit.finish_unshard()

    def _get_padded_unsharded_flat_param(self) -> torch.Tensor:
        """Return the full flat parameter with its padding, 1-D, in the dtype that it was gathered in.

        Raises:
            FlatParamError: if it is not in memory.
        """
        self._check_gathered("read")
        self._unit.finish_unshard()
        return self._held.buffer.tensor

    def _check_gathered(self, deed: str) -> None:
        if self._held.residency is Residency.SHARDED:
            raise FlatParamError(
                f"{self._held}: full parameters cannot be {deed} while they are not in memory; call handle.unshard() "
                "on every rank first, or use FullyShardedDataParallel.summon_full_params(model)"
            )

    # What the module shows

    def _use_sharded_views(self) -> None:
        """Have the module show the shard, and the originals be views of it, wherever it was moved to."""
        self._unit.reshard()
        self._held.stamp()  # Looking at it follows it.

    def _use_unsharded_views(self, as_params: bool = True) -> None:
        """Have the module show full parameters: autograd leaves in any case, each a registered parameter.

        Raises:
            FlatParamError: if they are not in memory.
        """
        self._use_unsharded_flat_param(self._held.buffer.tensor)

    def _setattr_tensor(self, module: nn.Module, param_name: str, tensor: torch.Tensor) -> None:
        """Do nothing if `tensor` is what the module shows under this name, or the shard's part of that parameter.

        Modules show no other tensors than these.

        Raises:
            FlatParamError: naming what to call instead.
        """
        if module._parameters.get(param_name) is not tensor and not self._is_part(module, param_name, tensor):
            raise FlatParamError(
                f"{self._held}: {param_name!r} cannot be given a different tensor behind the unit's back; change its "
                "values inside FullyShardedDataParallel.summon_full_params(model)"
            )

    def _is_part(self, module: nn.Module, param_name: str, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is this rank's part of that parameter: the same memory, or no elements if it has no part."""
        for infos, fragment in zip(self._held.param_infos, self._held.layout.fragments(self._held.rank), strict=True):
            if any(info.module is module and info.param_name == param_name for info in infos):
                part = fragment.in_shard
                return same_memory(tensor, self.flat_param[part.start : part.stop]) if part else not tensor.numel()
        return False


_views: WeakValueDictionary[int, HandleView] = WeakValueDictionary()
"""By the identity of our handle, which a view keeps alive."""


def _view_of(unit: Unit, handle: FlatParamHandle) -> HandleView:
    view = _views.get(id(handle))
    if view is None or view._unit is not unit:
        view = _views[id(handle)] = HandleView(unit, handle)
    return view


def handle_views(units: Iterable[Unit]) -> list[HandleView]:
    """FSDP1's handles of the flat parameters of `units`, in order; one object for each, as long as anybody has it."""
    return [_view_of(unit, handle) for unit in units for handle in unit.handles]
