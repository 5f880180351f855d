"""An optimizer that holds `DTensor`s steps the plain tensors that they stand for, as fast as if it held these.

It does if it treats each element alone, or says that it knows of shards (`allow_shards`). Any other computes with the
`DTensor`s, whose operations are those of whole tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias, final

import attrs
from torch import optim
from torch.distributed.tensor import DTensor

from flatparam_clients.second_door.faces import ShardedParameter, as_presented
from flatparam_runtime import OptimizerKind, kind_of_optimizer
from flatparam_runtime.optimizers.torch_optimizers import MAY_SEE_SHARDS
from flatparam_state.optimizer import HOLDERS

_HELD: Final = "_flatparam_held"
"""The attribute of an optimizer that says what stands for the parts that it steps."""

State: TypeAlias = "dict[Any, dict[str, Any]]"
"""The state of an optimizer: by parameter, its values by name."""


@final
@attrs.define(eq=False)
class _Held:
    """The two forms of an optimizer that holds faces: what users see, and what it steps.

    Between steps only the first one is there: what users take out of it is in memory nowhere else. After a step, only
    what is new is made for them.
    """

    faces: list[list[Any]] = attrs.field(factory=list)
    """The parameters of each group, with faces."""
    parts: list[list[Any]] = attrs.field(factory=list)
    """The same with the plain parts in their places."""
    shown: State = attrs.field(factory=dict)
    """The state that users see, while the optimizer steps; its tensors are `DTensor`s."""
    stored: State = attrs.field(factory=lambda: defaultdict(dict))
    """The state of the parts; between steps its entries are empty."""
    keys: list[int] | None = None
    """The identities of the parameters whose states these are."""
    known: list[int] = attrs.field(factory=list)
    """The identities of all that was in the state of the parts when the step began."""
    has_parts: bool = False
    """Whether the optimizer holds the parts now."""

    def take_off(self, optimizer: optim.Optimizer) -> None:
        """Have the optimizer hold the parts, with their states."""
        if self.has_parts:
            # A step has failed on the way.
            self.put_on(optimizer)
        self.list_parts(optimizer)
        self.shown = optimizer.state
        keys = [*map(id, self.shown)]
        if keys != self.keys:
            self.keys, self.stored = keys, defaultdict(dict, {_part_of(key): {} for key in self.shown})
        for key, shown, stored in zip(self.shown, self.shown.values(), self.stored.values(), strict=True):
            _store(key, shown, stored)
        self.known = _identities(self.stored)
        optimizer.state = self.stored  # type: ignore[assignment]
        self.has_parts = True

    def list_parts(self, optimizer: optim.Optimizer) -> None:
        """Put the parts in the places of the faces."""
        lists = [group["params"] for group in optimizer.param_groups]
        if len(lists) != len(self.faces) or not all(map(_are_same, lists, self.faces)):
            self.faces = [[*each] for each in lists]
            self.parts = [[_part_of(parameter) for parameter in each] for each in lists]
        for parameters, parts in zip(lists, self.parts, strict=True):
            parameters[:] = parts

    def list_faces(self, optimizer: optim.Optimizer) -> None:
        """Put the faces in their places again."""
        for group, faces in zip(optimizer.param_groups, self.faces, strict=False):
            group["params"][:] = faces

    def put_on(self, optimizer: optim.Optimizer) -> None:
        """Have the optimizer hold the faces again, with the state that users see."""
        self.has_parts = False
        self.list_faces(optimizer)
        stored: State = optimizer.state
        if stored is not self.stored or _identities(stored) != self.known:
            known = {*map(id, stored)}
            for key in [each for each in self.shown if id(_part_of(each)) not in known]:
                del self.shown[key]
            of_part: dict[int, Any] = {}
            for faces, parts in zip(self.faces, self.parts, strict=True):
                of_part.update(zip(map(id, parts), faces, strict=True))
            for part, state in stored.items():
                key = of_part.get(id(part), part)
                if isinstance(key, ShardedParameter):
                    _show(key, state, self.shown[key])
                else:
                    self.shown[key].clear()
                    self.shown[key].update(state)
            # In the order of the parameters, as an optimizer makes them that steps each by itself.
            for face in itertools.chain.from_iterable(self.faces):
                if face in self.shown:
                    self.shown[face] = self.shown.pop(face)
            self.keys = None
        for state in self.stored.values():
            state.clear()
        optimizer.state = self.shown  # type: ignore[assignment]
        self.shown = {}


def _part_of(parameter: Any) -> Any:
    return parameter.original if isinstance(parameter, ShardedParameter) else parameter


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _identities(state: State) -> list[int]:
    """Return the identities of the entries of a state, and of the values in them."""
    entries = state.values()
    return [*map(id, entries), *map(id, itertools.chain.from_iterable(map(dict.values, entries)))]


def _store(key: Any, shown: dict[str, Any], stored: dict[str, Any]) -> None:
    """Make `stored` what the part has of `shown`, the entry of a parameter."""
    for name, value in shown.items():
        if isinstance(value, DTensor) and isinstance(key, ShardedParameter):
            if value._spec is not key._spec and value.shape == key.shape and value.placements != key.placements:
                value = shown[name] = value.redistribute(key.device_mesh, key.placements)
            value = value._local_tensor
        stored[name] = value


def _show(face: ShardedParameter, stored: dict[str, Any], shown: dict[str, Any]) -> None:
    """Have `shown` be what users see of `stored`, the entry of a part."""
    for name in shown.keys() - stored.keys():
        del shown[name]
    for name, value in stored.items():
        shown[name] = as_presented(value, face, shown.get(name))


def _faces_of(optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer holds a face, or did when its step began."""
    held: _Held | None = vars(optimizer).get(_HELD)
    if held is not None and held.has_parts:
        return True
    return any(isinstance(each, ShardedParameter) for group in optimizer.param_groups for each in group["params"])


@functools.lru_cache(maxsize=64)
def _steps_parts(kind: Any) -> bool:
    """Return whether the optimizers of a class treat each element alone."""
    return kind_of_optimizer(kind) is OptimizerKind.ELEMENTS


def _before_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> Any:
    kind: Any = type(optimizer)
    may = _steps_parts(kind) or vars(optimizer).get(MAY_SEE_SHARDS, False)
    if not (may and _faces_of(optimizer)):
        return None
    held: _Held = vars(optimizer).setdefault(_HELD, _Held())
    _show_faces_to_hooks(optimizer)
    held.take_off(optimizer)
    if len(args) > 1 and args[1] is not None:
        return (args[0], _seeing_faces(held, *args[:2]), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _seeing_faces(held, optimizer, kwargs["closure"])}
    return None


def _seeing_faces(held: _Held, optimizer: optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return `closure`, which the step calls: what the optimizer holds, for example to clip it, are faces there."""

    @functools.wraps(closure)
    def called() -> Any:
        held.put_on(optimizer)
        loss = closure()
        held.take_off(optimizer)
        return loss

    return called


def _take_off_again(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    held: _Held = vars(optimizer)[_HELD]
    if not held.has_parts:
        held.take_off(optimizer)


def _show_faces_to_hooks(optimizer: optim.Optimizer) -> None:
    """Have the hooks that users have registered with the optimizer itself see faces, before a step and after it."""
    given: Any = optimizer
    for hooks, register, first, last in (
        (given._optimizer_step_pre_hooks, given.register_step_pre_hook, _after_step, _take_off_again),
        (given._optimizer_step_post_hooks, given.register_step_post_hook, _after_step, None),
    ):
        if not any(hook not in (first, last) for hook in hooks.values()):
            continue
        known = {hook: number for number, hook in hooks.items()}
        hooks.move_to_end(known[first] if first in known else register(first).id, last=False)
        if last is not None:
            hooks.move_to_end(known[last] if last in known else register(last).id)


def _after_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    held: _Held | None = vars(optimizer).get(_HELD)
    if held is not None and held.has_parts:
        held.put_on(optimizer)


@contextlib.contextmanager
def _holding_parts(optimizer: optim.Optimizer) -> Iterator[None]:
    _before_step(optimizer, (), {})
    try:
        yield
    finally:
        _after_step(optimizer, (), {})


@functools.cache
def have_optimizers_step_parts() -> None:
    """Have each optimizer in the process hold the parts of faces while it steps; a second call does nothing."""
    torchs: Any = sys.modules[optim.Optimizer.__module__]
    for hook, register, known in (
        (_before_step, torchs.register_optimizer_step_pre_hook, torchs._global_optimizer_pre_hooks),
        (_after_step, torchs.register_optimizer_step_post_hook, torchs._global_optimizer_post_hooks),
    ):
        # Before the hook that looks at what is stepped, which others may have registered earlier.
        known.move_to_end(register(hook).id, last=False)
    HOLDERS.append(_holding_parts)
    zero_grad = optim.Optimizer.zero_grad

    @functools.wraps(zero_grad)
    def zero_parts(optimizer: optim.Optimizer, set_to_none: bool = True) -> None:
        held: _Held | None = vars(optimizer).get(_HELD)
        if held is None or held.has_parts:
            zero_grad(optimizer, set_to_none)
            return
        held.list_parts(optimizer)
        try:
            if set_to_none:
                for face, part in zip(itertools.chain(*held.faces), itertools.chain(*held.parts), strict=True):
                    part.grad = None
                    if face is not part:
                        face.let_go()
            zero_grad(optimizer, set_to_none)
        finally:
            held.list_faces(optimizer)

    optim.Optimizer.zero_grad = zero_parts  # type: ignore[method-assign, assignment]
