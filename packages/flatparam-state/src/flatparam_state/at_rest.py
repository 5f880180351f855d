"""A model at rest: each rank has its shards, nobody uses full parameters, and, if asked for, no optimizer steps.

The homes of a model are the tensors that have memory of their own on this rank: shards, whole parameters, buffers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias, final

import attrs
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from flatparam_runtime import FlatParamError, FlatParamHandle, Phase, clean_fqn, refuse_in_a_pass, units_in
from flatparam_state.places import Place, places_in


def bring_to_rest(model: nn.Module) -> None:
    """Free the full parameters of `model`, none of whose units may be in use.

    Raises:
        FlatParamError: inside a forward or backward pass, or inside `summon_full_params`.
    """
    for unit in units_in(model):
        refuse_in_a_pass(unit)
        if unit.showing.pins or unit.phase is Phase.INSPECTING:
            raise FlatParamError(
                f"unit {unit.name!r}: its shards are not saved, loaded, published or moved while full parameters are "
                "summoned; leave summon_full_params() first"
            )
        unit.reshard()
        unit.take_over()


# Optimizers that may not step now, because a model shows something other than what they are to change


_REASONS: Final[Any] = WeakIdKeyDictionary()
"""For each parameter, why an optimizer that holds it may not step: the latest reason last."""


def refuse_steps(parameters: Iterable[torch.Tensor], reason: str) -> None:
    """Refuse each step of an optimizer that holds one of `parameters`, with an error that gives the `reason`."""
    _look_before_steps()
    for parameter in parameters:
        _REASONS[parameter] = (*_REASONS.get(parameter, ()), reason)


def allow_steps(parameters: Iterable[torch.Tensor], reason: str) -> None:
    """Undo one `refuse_steps` with this `reason`, as far as there was one."""
    for parameter in parameters:
        left = list(_REASONS.pop(parameter, ()))
        if reason in left:
            left.remove(reason)
        if left:
            _REASONS[parameter] = tuple(left)


@functools.cache
def _look_before_steps() -> None:
    """Have each optimizer in the process looked at when it steps; a second call does nothing."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not len(_REASONS):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reasons = _REASONS.get(parameter)
            if reasons:
                raise FlatParamError(f"{type(optimizer).__name__}.step(): {reasons[-1]}")


@final
@attrs.frozen(eq=False)
class _ShardHome:
    """A flat parameter, of which this rank has one shard."""

    name: str
    """The names of its first and its last parameter in the unsharded model."""
    handle: FlatParamHandle
    is_buffer: bool = False

    def now(self) -> Tensor:
        """Return the tensor as it is now, detached: writing to it changes the model."""
        self.handle.take_over()
        return self.handle.flat_param.detach()

    def give(self, data: Tensor) -> None:
        """Have the model use the memory of `data` (same shape and device) from now on."""
        self.handle.flat_param.data = data
        # The handle looks where it is now.
        self.handle.stamp()

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters in this memory, which may have a `.grad`."""
        exposure = self.handle.exposure
        return {id(each): each for each in (*exposure.parameters(), *exposure.originals().values())}.values()


@final
@attrs.frozen(eq=False)
class _WholeHome:
    """A parameter or buffer that every rank has whole. Its module may get a different object for it."""

    name: str
    module: nn.Module
    attribute: str
    is_buffer: bool

    def now(self) -> Tensor:
        """Return the tensor as it is now, detached: writing to it changes the model."""
        return self._tensor().detach()

    def give(self, data: Tensor) -> None:
        """Have the model use the memory of `data` (same shape and device) from now on."""
        self._tensor().data = data

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the tensor, if it is a parameter."""
        tensor = self._tensor()
        return (tensor,) if isinstance(tensor, nn.Parameter) else ()

    def _tensor(self) -> Tensor:
        held = self.module._buffers if self.is_buffer else self.module._parameters
        tensor = held.get(self.attribute)
        if tensor is None:
            raise FlatParamError(
                f"{self.name!r} is no longer in its module: it was removed, or the model was sharded after its "
                "average started; make a new ShardedEMA of the model"
            )
        return tensor


Home: TypeAlias = _ShardHome | _WholeHome
"""Where a model keeps one tensor. The tensor may have been moved since the last look, but not reshaped."""


def homes_in(model: nn.Module) -> list[Home]:
    """Every home in `model`, each tensor once: shards, then whole parameters, then buffers, persistent or not."""
    places = list(places_in(model))
    shards: list[Home] = [_ShardHome(_name_of(place), place.handle) for place in places]
    whole = list(_whole(model, places))
    return [*shards, *sorted(whole, key=lambda home: home.is_buffer)]


def _name_of(place: Place) -> str:
    first, *_, last = (place.fqns[0], *place.fqns)
    return first if len(place.fqns) == 1 else f"{first} .. {last}"


def _whole(model: nn.Module, places: Iterable[Place]) -> Iterator[_WholeHome]:
    sharded = {
        (info.module, info.param_name) for place in places for infos in place.handle.param_infos for info in infos
    }
    seen = {id(place.handle.flat_param) for place in places}
    for path, module in model.named_modules():
        held = [(name, each, False) for name, each in module._parameters.items()]
        held += [(name, each, True) for name, each in module._buffers.items()]
        for attribute, tensor, is_buffer in held:
            if tensor is None or id(tensor) in seen or (module, attribute) in sharded:
                continue
            seen.add(id(tensor))
            yield _WholeHome(clean_fqn(f"{path}.{attribute}" if path else attribute), module, attribute, is_buffer)


@contextlib.contextmanager
def gradients_aside(homes: Iterable[Home]) -> Iterator[None]:
    """Keep the gradients of the parameters in `homes` out of the way; those that come meanwhile are dropped."""
    parameters = [parameter for home in homes for parameter in home.parameters()]
    kept = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, gradient in kept:
                parameter.grad = gradient
