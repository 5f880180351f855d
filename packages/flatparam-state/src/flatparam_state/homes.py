"""The tensors of a model that have memory of their own on this rank: shards, whole parameters, buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_runtime import FlatParamError, FlatParamHandle, clean_fqn
from flatparam_state.places import Place, places_in

__all__ = ["Home", "gradients_aside", "homes_in"]


class Home(Protocol):
    """Where a model keeps one tensor. The tensor may have been moved since the last look, but not reshaped."""

    @property
    def name(self) -> str:
        """The name of the tensor in the unsharded model; of a shard, its first and its last."""
        ...

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer."""
        ...

    def now(self) -> Tensor:
        """Return the tensor as it is now, detached: writing to it changes the model."""
        ...

    def give(self, data: Tensor) -> None:
        """Have the model use the memory of `data` (same shape and device) from now on."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters in this memory, which may have a `.grad`."""
        ...


@final
@attrs.frozen(eq=False)
class _ShardHome:
    """A flat parameter, of which this rank has one shard."""

    name: str
    handle: FlatParamHandle
    is_buffer: bool = False

    def now(self) -> Tensor:
        self.handle.take_over()
        return self.handle.flat_param.detach()

    def give(self, data: Tensor) -> None:
        self.handle.flat_param.data = data
        # The handle looks where it is now.
        self.handle.stamp()

    def parameters(self) -> Iterable[nn.Parameter]:
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
        return self._tensor().detach()

    def give(self, data: Tensor) -> None:
        self._tensor().data = data

    def parameters(self) -> Iterable[nn.Parameter]:
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
        (info.module, info.param_name)
        for place in places
        for infos in place.handle.param_infos
        for info in infos
    }
    seen = {id(place.handle.flat_param) for place in places}
    for path, module in model.named_modules():
        held = [(name, each, False) for name, each in module._parameters.items()]
        held += [(name, each, True) for name, each in module._buffers.items()]
        for attribute, tensor, is_buffer in held:
            if tensor is None or id(tensor) in seen or (module, attribute) in sharded:
                continue
            seen.add(id(tensor))
            yield _WholeHome(
                clean_fqn(f"{path}.{attribute}" if path else attribute), module, attribute, is_buffer
            )


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
