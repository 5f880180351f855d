"""`offload` and `onload`: what a sharded model takes on its device, moved elsewhere between two uses."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import attrs
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from flatparam_runtime import FlatParamError, Unit, units_in
from flatparam_state.checkpoint.model_tensors import bring_to_rest
from flatparam_state.checkpoint.save import optimizers_by_name
from flatparam_state.homes import Home, homes_in
from flatparam_state.model import refused_anywhere
from flatparam_state.offloading.memory import Relocation, is_mapped, mapped_in, to_device
from flatparam_state.steps_refused import allow_steps, refuse_steps

__all__ = ["offload", "onload"]

_HOST: Final = torch.device("cpu")
_OFFLOADED: Final = "the model's parameters are offloaded; call flatparam.onload(model) on every rank first"


@torch.no_grad()
def offload(
    model: nn.Module,
    *,
    folder: str | os.PathLike[str] | None = None,
    parameters: bool = True,
    gradients: bool = True,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
) -> int:
    """Move this rank's part of `model` out of the memory of its device; every rank calls it.

    Values are kept to the bit. What is moved already stays where it is. Until `onload`, forward passes, gathers of full
    parameters and steps of an optimizer that holds the parameters are refused. A `Checkpointer` can save the model as
    it is. Buffers, averages and counters of an optimizer stay.

    Args:
        model: sharded by the wrapper, by `fully_shard` or by `shard_module`.
        folder: a folder on a disk of this host. The files have no name, so nobody else can read or change them, and
            their space is free again when they are not needed, even if the process is killed. None: to host memory;
            what is there already stays, so on the CPU nothing moves.
        parameters: move the shards, and parameters that are whole on every rank.
        gradients: move `.grad` of these. On an accelerator gradients go with the parameters in any case, because torch
            wants them on one device; with `folder` those then go to host memory.
        optimizer: move the state of this optimizer; of several by name.

    Returns:
        The bytes of the storages that were moved, whose memory is free now.

    Raises:
        FlatParamError: on every rank, if one is inside a pass, or has full parameters summoned or gradients that were
            not reduced (`no_sync`), or if its disk cannot be written; nothing is changed.
        TypeError: for an optimizer that is none.
        ValueError: if the model has no unit, the optimizer has none of its parameters, or the gradients of an
            accelerator are to be moved alone.
    """
    trip = _Trip(model, parameters, gradients, optimizer)
    where = "host memory" if folder is None else f"the folder {os.fspath(folder)!r}"
    host = Relocation(to_device(_HOST))
    chosen = host if folder is None else Relocation(mapped_in(Path(folder)))

    def choose(tensor: Tensor, kind: _Kind, home: torch.device) -> Relocation | None:
        wanted = chosen if trip.wants[kind] else host
        if tensor.is_cpu and (wanted is host or is_mapped(tensor)):
            return None
        goes_along = kind is _Kind.GRADIENT and parameters and not tensor.is_cpu
        return wanted if trip.wants[kind] or goes_along else None

    trip.check_can_part()
    _on_every_rank(trip.units, f"offload to {where}", lambda: trip.prepare(choose))
    if parameters:
        _note_homes(trip.homes)
    trip.install()
    if parameters:
        _say_where(trip, where)
    _release_caches(trip.units)
    return chosen.nbytes + (host.nbytes if host is not chosen else 0)


@torch.no_grad()
def onload(
    model: nn.Module,
    *,
    parameters: bool = True,
    gradients: bool = True,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
) -> int:
    """Move the tensors that `offload` has moved back to their device; every rank calls it. Other tensors do not move.

    Args:
        parameters: bring back the shards, and parameters that are whole on every rank.
        gradients: bring back `.grad`. On an accelerator gradients come with the parameters in any case.
        optimizer: bring back the state of this optimizer, to the devices of its parameters; of several by name.

    Returns:
        The bytes of the storages that were moved.

    Raises:
        FlatParamError: on every rank, if one lacks the memory, or is inside a pass; nothing is changed.
        ValueError: if the model has no unit.
    """
    trip = _Trip(model, parameters, gradients, optimizer)
    relocations: dict[torch.device, Relocation] = {}

    def choose(tensor: Tensor, kind: _Kind, home: torch.device) -> Relocation | None:
        goes_along = kind is _Kind.GRADIENT and parameters and tensor.device != home
        is_here = tensor.device == home and not is_mapped(tensor)
        if is_here or not (trip.wants[kind] or goes_along):
            return None
        return relocations.setdefault(home, Relocation(to_device(home)))

    _on_every_rank(trip.units, "onload", lambda: trip.prepare(choose))
    trip.install()
    if parameters:
        _say_where(trip, "")
    return sum(each.nbytes for each in relocations.values())


class _Kind(enum.Enum):
    """The part that a tensor plays in the model."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    STATE = "state of the optimizer"


_Choose: TypeAlias = Callable[[Tensor, _Kind, torch.device], "Relocation | None"]
"""From a tensor and the device where its parameter belongs, to what moves the tensor; None leaves it."""

_HOMES: Final[Any] = WeakIdKeyDictionary()
"""The device where each parameter that is offloaded belongs."""


@final
@attrs.define(eq=False)
class _Trip:
    """The tensors of a model and its optimizers that are to move, and the ones that they become."""

    model: nn.Module
    parameters: bool
    gradients: bool
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None
    units: tuple[Unit, ...] = attrs.field(init=False)
    homes: list[Home] = attrs.field(init=False)
    wants: Mapping[_Kind, bool] = attrs.field(init=False)
    _data: list[tuple[Home, Tensor]] = attrs.field(factory=list)
    _grads: dict[int, Tensor] = attrs.field(factory=dict)
    """The new gradients, by the identity of their parameter."""
    _states: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)

    @units.default
    def _find_units(self) -> tuple[Unit, ...]:
        units = units_in(self.model)
        if not units:
            raise ValueError(
                f"expected a sharded model to offload, found a {type(self.model).__name__} without a unit: wrap it in "
                "FullyShardedDataParallel, or call fully_shard, first"
            )
        return units

    def __attrs_post_init__(self) -> None:
        own = {id(parameter) for home in self.homes for parameter in home.parameters()}
        for each in optimizers_by_name(self.optimizer).values():
            # Optimizers of other libraries have a state too.
            if not hasattr(each, "state"):
                raise TypeError(f"expected an optimizer whose state is to move, found {each!r}")
            stepped = [p for group in getattr(each, "param_groups", ()) for p in group["params"]]
            if stepped and own.isdisjoint(map(id, stepped)):
                raise ValueError(
                    f"expected the optimizer of this model, found one ({type(each).__name__}) that holds none of its "
                    "parameters: pass the one that steps them"
                )

    @homes.default
    def _find_homes(self) -> list[Home]:
        return [home for home in homes_in(self.model) if not home.is_buffer]

    @wants.default
    def _as_asked(self) -> Mapping[_Kind, bool]:
        return {_Kind.PARAMETER: self.parameters, _Kind.GRADIENT: self.gradients, _Kind.STATE: True}

    def check_can_part(self) -> None:
        """Refuse to move the gradients of an accelerator without their parameters."""
        for home in self.homes:
            device = home.now().device
            if self.gradients and not self.parameters and device.type != "cpu" and _gradients_of(home):
                raise ValueError(
                    f"offload: the gradient of {home.name!r} is on {device}, and torch wants it beside its parameter: "
                    "pass parameters=True too, or gradients=False"
                )

    def prepare(self, choose: _Choose) -> None:
        """Copy what moves to its new memory; the model is not changed."""
        for unit in self.units:
            _check_reduced(unit)
        bring_to_rest(self.model)
        for home in self.homes:
            data = home.now()
            belongs = _belongs(home)
            moves = choose(data, _Kind.PARAMETER, belongs)
            if moves is not None:
                self._data.append((home, moves.of(data)))
            for parameter, gradient in _gradients_of(home):
                moves = choose(gradient, _Kind.GRADIENT, belongs)
                if moves is not None:
                    self._grads[id(parameter)] = moves.of(gradient)
        for device, tensor in self._states_with_devices():
            moves = choose(tensor, _Kind.STATE, device)
            if moves is not None:
                self._states.append((tensor, moves.of(tensor)))

    def install(self) -> None:
        """Give the model, the gradients and the optimizers their new memory."""
        kept = [pair for home in self.homes for pair in _gradients_of(home)]
        for parameter, _ in kept:
            parameter.grad = None
        for home, data in self._data:
            home.give(data)
        for parameter, gradient in kept:
            parameter.grad = self._grads.get(id(parameter), gradient)
        for tensor, moved in self._states:
            tensor.data = moved

    def _states_with_devices(self) -> Iterator[tuple[torch.device, Tensor]]:
        """The tensors of the optimizers' states, each with the device where its parameter belongs."""
        devices = {id(p): _belongs(home) for home in self.homes for p in home.parameters()}
        for optimizer in optimizers_by_name(self.optimizer).values():
            for parameter, state in optimizer.state.items():
                device = devices.get(id(parameter))
                # Counters are read by the host; other models' parameters stay as they are.
                tensors = (each for each in state.values() if isinstance(each, Tensor) and each.dim())
                yield from ((device, each) for each in tensors if device is not None)


def _gradients_of(home: Home) -> list[tuple[nn.Parameter, Tensor]]:
    return [(each, each.grad) for each in home.parameters() if each.grad is not None]


def _belongs(home: Home) -> torch.device:
    """The device where a parameter is while the model is not offloaded."""
    noted = (_HOMES.get(parameter) for parameter in home.parameters())
    device: torch.device | None = next((each for each in noted if each is not None), None)
    return home.now().device if device is None else device


def _note_homes(homes: Sequence[Home]) -> None:
    for home in homes:
        device = _belongs(home)
        for parameter in home.parameters():
            _HOMES[parameter] = device


def _say_where(trip: _Trip, where: str) -> None:
    """Have forward passes and steps refused if the model is somewhere, and allowed again if `where` is empty."""
    held = [parameter for home in trip.homes for parameter in home.parameters()]
    for unit in trip.units:
        unit.showing.away = where
    allow_steps(held, _OFFLOADED)
    if where:
        refuse_steps(held, _OFFLOADED)
    else:
        for parameter in held:
            _HOMES.pop(parameter, None)


def _check_reduced(unit: Unit) -> None:
    for handle in unit.handles:
        if not handle.gradients.is_empty:
            raise FlatParamError(
                f"unit {unit.name!r}: it has gradients that were not reduced, of passes under no_sync(): run a "
                "backward pass that reduces them, or drop them, first"
            )


def _on_every_rank(units: Sequence[Unit], deed: str, prepare: Callable[[], None]) -> None:
    """Prepare; if a rank fails, every rank raises the same error.

    Raises:
        FlatParamError: naming each rank that has failed, and why.
    """
    cause, refused = None, []
    try:
        prepare()
    except (RuntimeError, OSError, MemoryError) as error:
        cause, refused = error, [f"{type(error).__name__}: {error}"]
    everywhere = refused_anywhere(units[0].topology, refused)
    if everywhere:
        raise FlatParamError(f"cannot {deed}, and nothing was changed: {'; '.join(everywhere)}") from cause


def _release_caches(units: Sequence[Unit]) -> None:
    """Give the memory that torch keeps for later back to the accelerator."""
    for device in {unit.device.type for unit in units} | {"cpu"}:
        release = getattr(getattr(torch, device, None), "empty_cache", None)
        if callable(release):
            release()
