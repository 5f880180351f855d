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
from flatparam_state.at_rest import Home, allow_steps, bring_to_rest, homes_in, refuse_steps
from flatparam_state.moved_memory import Move, finish_copies, is_mapped, mapped_in, pinned, relocated, to_device
from flatparam_state.optimizer.held import of_parts
from flatparam_state.ranks import refused_anywhere

_OFFLOADED: Final = "the model's parameters are offloaded; call flatparam.onload(model) on every rank first"


@of_parts
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
            their space is free again when they are not needed, even if the process is killed. None: to host memory,
            which is pinned, less than twice the bytes that move; what is there already stays, so on the CPU nothing
            moves.
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
    chosen = pinned if folder is None else mapped_in(Path(folder))

    def choose(tensor: Tensor, kind: _Kind, _: _Belongs) -> Move | None:
        wanted = chosen if trip.wants[kind] else pinned
        if tensor.is_cpu and (wanted is pinned or is_mapped(tensor)):
            return None
        goes_along = kind is _Kind.GRADIENT and parameters and not tensor.is_cpu
        return wanted if trip.wants[kind] or goes_along else None

    trip.check_can_part()
    _on_every_rank(trip.units, f"offload to {where}", lambda: trip.prepare(choose))
    for home in trip.homes if parameters else ():
        belongs = _belongs(home)
        for parameter in home.parameters():
            _HOMES[parameter] = belongs
    trip.install()
    if parameters:
        _say_where(trip, where)
    _release_caches(trip.units)
    return trip.nbytes


@of_parts
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
    moves: dict[tuple[torch.device, bool], Move] = {}

    def choose(tensor: Tensor, kind: _Kind, belongs: _Belongs) -> Move | None:
        home = belongs.device
        goes_along = kind is _Kind.GRADIENT and parameters and tensor.device != home
        is_here = tensor.device == home and not is_mapped(tensor)
        if is_here or not (trip.wants[kind] or goes_along):
            return None
        pin_memory = belongs.is_pinned and kind is _Kind.PARAMETER
        return moves.setdefault((home, pin_memory), to_device(home, pin_memory=pin_memory))

    _on_every_rank(trip.units, "onload", lambda: trip.prepare(choose))
    trip.install()
    if parameters:
        _say_where(trip, "")
    return trip.nbytes


class _Kind(enum.Enum):
    """The part that a tensor plays in the model."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    STATE = "state of the optimizer"


@final
@attrs.frozen
class _Belongs:
    """The memory where a parameter is while the model is not offloaded."""

    device: torch.device
    is_pinned: bool


@final
@attrs.frozen(eq=False)
class _Moving:
    """A tensor that is to move, and who gets the new one: a home, a parameter, or a state by its name."""

    kind: _Kind
    owner: Any
    tensor: Tensor
    belongs: _Belongs


_Choose: TypeAlias = Callable[[Tensor, _Kind, _Belongs], "Move | None"]
"""From a tensor and the memory where its parameter belongs, to what moves the tensor; None leaves it."""

_HOMES: Final[Any] = WeakIdKeyDictionary()
"""Where each parameter that is offloaded belongs."""


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
    nbytes: int = 0
    """The bytes of the storages that have moved."""
    _new: dict[_Kind, list[tuple[Any, Tensor]]] = attrs.field(factory=dict)
    """For each kind, who gets a new tensor, and the tensor."""

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
        for each in self._optimizers():
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
        """Copy what moves to its new memory, and wait once until it is there; the model is not changed."""
        for unit in self.units:
            _check_reduced(unit)
        bring_to_rest(self.model)
        by_move: dict[Move, list[_Moving]] = {}
        for each in self._movable():
            move = choose(each.tensor, each.kind, each.belongs)
            if move is not None:
                by_move.setdefault(move, []).append(each)
        moving = [each for group in by_move.values() for each in group]
        try:
            for move, group in by_move.items():
                tensors, nbytes = relocated([each.tensor for each in group], [each.kind for each in group], move)
                self.nbytes += nbytes
                for each, tensor in zip(group, tensors, strict=True):
                    self._new.setdefault(each.kind, []).append((each.owner, tensor))
        finally:
            # Also after an error: what the copies read and write is freed next.
            finish_copies(device for each in moving for device in (each.tensor.device, each.belongs.device))

    def install(self) -> None:
        """Give the model, the gradients and the optimizers their new memory."""
        kept = [pair for home in self.homes for pair in _gradients_of(home)]
        new = {id(parameter): gradient for parameter, gradient in self._new.get(_Kind.GRADIENT, ())}
        for parameter, _ in kept:
            parameter.grad = None
        for home, data in self._new.get(_Kind.PARAMETER, ()):
            home.give(data)
        for parameter, gradient in kept:
            parameter.grad = new.get(id(parameter), gradient)
        for (state, name), moved in self._new.get(_Kind.STATE, ()):
            # A view keeps what it is a view of, wherever its own data go.
            if state[name]._is_view():
                state[name] = moved
            else:
                state[name].data = moved

    def _movable(self) -> Iterator[_Moving]:
        for home in self.homes:
            data, belongs = home.now(), _belongs(home)
            yield _Moving(_Kind.PARAMETER, home, data, belongs)
            for parameter, gradient in _gradients_of(home):
                yield _Moving(_Kind.GRADIENT, parameter, gradient, belongs)
        for belongs, state, name in self._states():
            yield _Moving(_Kind.STATE, (state, name), state[name], belongs)

    def _optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return each optimizer whose state is to move."""
        if isinstance(self.optimizer, Mapping):
            return list(self.optimizer.values())
        return [] if self.optimizer is None else [self.optimizer]

    def _states(self) -> Iterator[tuple[_Belongs, dict[str, Any], str]]:
        """Yield where the tensors of the optimizers' states are, each with where its parameter belongs."""
        found = {id(p): _belongs(home) for home in self.homes for p in home.parameters()}
        for optimizer in self._optimizers():
            for parameter, state in optimizer.state.items():
                belongs = found.get(id(parameter))
                # Counters are read by the host; other models' parameters stay as they are.
                tensors = (name for name, each in state.items() if isinstance(each, Tensor) and each.dim())
                yield from ((belongs, state, name) for name in tensors if belongs is not None)


def _gradients_of(home: Home) -> list[tuple[nn.Parameter, Tensor]]:
    return [(each, each.grad) for each in home.parameters() if each.grad is not None]


def _belongs(home: Home) -> _Belongs:
    noted = (_HOMES.get(parameter) for parameter in home.parameters())
    found: _Belongs | None = next((each for each in noted if each is not None), None)
    data = home.now()
    return _Belongs(data.device, data.is_pinned()) if found is None else found


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
