"""An optimizer that holds `DTensor`s steps the plain tensors that they stand for, as fast as if it held these.

It does if it treats each element alone, or says that it knows of shards (`allow_shards`). Any other computes with the
`DTensor`s, whose operations are those of whole tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias, final

import attrs
import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatparam.compat import inner_of
from flatparam_clients.second_door.faces import ShardedParameter, as_presented
from flatparam_optim import may_step_shards
from flatparam_runtime import untraced
from flatparam_runtime.optimizers.torch_optimizers import STEPS, keep_own_part
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
    kinds: list[type] = attrs.field(factory=list)
    """The classes of the faces: `to()` of a module may turn one into a plain `DTensor` for a while."""
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

    @contextlib.contextmanager
    def parts_in(self, optimizer: optim.Optimizer) -> Iterator[None]:
        """Have the optimizer hold the parts inside, and faces again after it, also if an exception ends it."""
        self.take_off(optimizer)
        try:
            yield
        finally:
            if self.has_parts:
                self.put_on(optimizer)

    def take_off(self, optimizer: optim.Optimizer) -> None:
        """Have the optimizer hold the parts, with their states."""
        self.list_parts(optimizer)
        self.shown = optimizer.state
        was_made_before = False
        keys = [*map(id, self.shown)]
        if keys != self.keys:
            was_made_before = self._show_what_was_made_before()
            self.keys = [*map(id, self.shown)]
            self.stored = defaultdict(dict, {_part_of(key): {} for key in self.shown})
        for key, shown, stored in zip(self.shown, self.shown.values(), self.stored.values(), strict=True):
            _store(key, shown, stored)
        self.known = _identities(self.stored)
        optimizer.state = self.stored  # type: ignore[assignment]
        self.has_parts = True
        if was_made_before:
            # Behind the identities: what is cut is new to users.
            keep_own_part(optimizer)

    def _show_what_was_made_before(self) -> bool:
        """Give faces the states that the optimizer has made of parameters before they were sharded; true if it has."""
        pairs = zip(itertools.chain(*self.faces), itertools.chain(*self.parts), strict=True)
        made = [(face, part) for face, part in pairs if face is not part and part in self.shown]
        for face, part in made:
            state = self.shown.pop(part)
            self.shown.setdefault(face, state)
        return bool(made)

    def list_parts(self, optimizer: optim.Optimizer) -> None:
        """Put the parts in the places of the faces."""
        lists = [group["params"] for group in optimizer.param_groups]
        kinds = [*map(type, itertools.chain(*lists))]
        if len(lists) != len(self.faces) or not all(map(_are_same, lists, self.faces)) or kinds != self.kinds:
            self.faces, self.kinds = [[*each] for each in lists], kinds
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
            known, before = {*map(id, stored)}, {*map(id, self.shown)}
            for key in [each for each in self.shown if id(_part_of(each)) not in known]:
                del self.shown[key]
            # A program may have dropped a parameter, and not its state.
            of_part: dict[int, Any] = {id(_part_of(key)): key for key in self.shown}
            for faces, parts in zip(self.faces, self.parts, strict=True):
                of_part.update(zip(map(id, parts), faces, strict=True))
            for part, state in stored.items():
                key = of_part.get(id(part), part)
                if isinstance(key, ShardedParameter):
                    _show(key, state, self.shown[key])
                else:
                    self.shown[key].clear()
                    self.shown[key].update(state)
            # What is new, in the order of the parameters, as an optimizer makes it that steps each by itself.
            for face in itertools.chain.from_iterable(self.faces):
                if face in self.shown and id(face) not in before:
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


def _may_step_parts(optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer holds a face, and treats each element alone or knows of shards."""
    held = (each for group in optimizer.param_groups for each in group["params"])
    return any(isinstance(each, ShardedParameter) for each in held) and may_step_shards(optimizer)


def _before_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Have the step of this optimizer's class, which is called next, hold parts."""
    if _HELD not in vars(optimizer) and not torch.compiler.is_compiling() and _may_step_parts(optimizer):
        kind: Any = type(optimizer)
        _have_step_hold_parts(kind.step)


@functools.lru_cache(maxsize=64)
def _have_step_hold_parts(hooked: Any) -> None:
    """Have the step inside of torch's function around it, which calls the hooks of users, hold parts.

    So these hooks see faces, and the optimizer holds faces again also after an exception.

    Raises:
        RuntimeError: if this torch's function is made in another way.
    """
    cell = inner_of(hooked)
    cell.cell_contents = _holding_parts_in(cell.cell_contents)


def _holding_parts_in(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `step` of a class of optimizers, with parts in the places of faces."""

    @functools.wraps(step)
    @functools.partial(untraced, with_callees=False)
    def stepped(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not _may_step_parts(optimizer):
            return step(optimizer, *args, **kwargs)
        held: _Held = vars(optimizer).setdefault(_HELD, _Held())
        if args and args[0] is not None:
            args = (_seeing_faces(held, optimizer, args[0]), *args[1:])
        elif kwargs.get("closure") is not None:
            kwargs["closure"] = _seeing_faces(held, optimizer, kwargs["closure"])
        with held.parts_in(optimizer):
            return step(optimizer, *args, **kwargs)

    return stepped


def _seeing_faces(held: _Held, optimizer: optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return `closure`, which the step calls: what the optimizer holds, for example to clip it, are faces there."""

    @functools.wraps(closure)
    def called() -> Any:
        held.put_on(optimizer)
        loss = closure()
        held.take_off(optimizer)
        return loss

    return called


@contextlib.contextmanager
def _holding_parts(optimizer: optim.Optimizer) -> Iterator[None]:
    held: _Held | None = vars(optimizer).get(_HELD)
    if not _may_step_parts(optimizer) or (held is not None and held.has_parts):
        yield
        return
    held = vars(optimizer).setdefault(_HELD, _Held())
    with held.parts_in(optimizer):
        yield


@functools.cache
def have_optimizers_step_parts() -> None:
    """Have each optimizer in the process hold the parts of faces while it steps; a second call does nothing."""
    # Those of torch at once, since a compiler may be given their step; any other when it steps first.
    for kind in STEPS:
        step: Any = kind.step
        if getattr(step, "hooked", False):
            _have_step_hold_parts(step)
        else:
            kind.step = _holding_parts_in(step)  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_before_step)
    HOLDERS.append(_holding_parts)
    zero_grad = optim.Optimizer.zero_grad

    @untraced
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
