"""The parameters of an optimizer and their groups, and the parameters of the sharded model that they stand for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar, cast, final

import attrs
import torch
from torch import nn
from typing_extensions import Self

from flatparam_runtime import FlatParamError, clean_fqn, part_states_of
from flatparam_state.optimizer.entry import State, is_equal
from flatparam_state.places import Place, places_in

F = TypeVar("F", bound=Callable[..., Any])


@final
@attrs.frozen(eq=False)
class Held:
    """One parameter that an optimizer can hold, and the parameters of the model that it stands for.

    A flat parameter stands for all of its parameters, an original for itself. Without a `place` it is not sharded.
    """

    parameter: torch.Tensor
    fqns: tuple[str, ...]
    place: Place | None = None
    indices: tuple[int, ...] = ()
    """The places of `fqns` in the layout."""
    part_states: frozenset[str] | None = None
    """The names of the states that are cut like the parameter if they have its shape; `None` stands for all."""

    @property
    def is_flat(self) -> bool:
        """Whether it is a flat parameter, whose states have the length of the shard."""
        return self.place is not None and self.parameter is self.place.handle.flat_param

    def is_cut(self, name: str, value: object) -> bool:
        """Return whether `value`, the optimizer's state `name`, is shaped like the parameter, and cut like it."""
        if not isinstance(value, torch.Tensor) or value.shape != self.parameter.shape:
            return False
        return self.part_states is None or name in self.part_states

    def is_kept_once(self, name: str) -> bool:
        """Return whether the optimizer's state `name` may be on one rank alone, in one of the replicas."""
        return self.part_states is not None and name not in self.part_states

    def has_own(self, name: str) -> bool:
        """Return whether this rank's optimizer has a state `name` of it: beside `DTensor`s, also of an empty part."""
        if not self.is_elsewhere:
            return True
        return self.place is not None and self.place.handle.faces is not None and not self.is_kept_once(name)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is an original of which other ranks have all elements, so that it is never stepped here."""
        if self.place is None or self.is_flat or self.parameter.numel():
            return False
        return any(self.place.handle.layout.slots[index].spec.numel for index in self.indices)


HOLDERS: Final[list[Callable[[torch.optim.Optimizer], AbstractContextManager[None]]]] = []
"""Contexts inside which an optimizer holds this rank's parts, if it holds something that stands for them."""


@contextlib.contextmanager
def holding_parts(*optimizers: torch.optim.Optimizer) -> Iterator[None]:
    """Have optimizers hold this rank's parts of parameters inside, with the states of the parts; see `HOLDERS`."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            for enter in HOLDERS:
                stack.enter_context(enter(innermost(optimizer)))
        yield


def of_parts(function: F) -> F:
    """Have a function of a model and its optimizers find this rank's parts in these."""

    @functools.wraps(function)
    def with_parts(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("optimizer")
        several = given.values() if isinstance(given, Mapping) else [given]
        with holding_parts(*(each for each in several if isinstance(each, torch.optim.Optimizer))):
            return function(model, *args, **kwargs)

    return cast("F", with_parts)


def held_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Mapping[int, Held]:
    """Return every parameter of `model` that an optimizer may hold, by identity.

    Args:
        model: the sharded model.
        optimizer: may say that states belong to parameters as wholes.
    """
    held: dict[int, Held] = {}
    for place in places_in(model):
        exposure, fqns = place.handle.exposure, place.fqns
        flat = place.handle.flat_param
        if exposure.parameters()[0] is flat:
            held[id(flat)] = Held(flat, tuple(fqns[index] for index in place.indices), place, place.indices)
        for index, parameter in exposure.originals().items():
            if index in place.indices:
                held[id(parameter)] = Held(parameter, (fqns[index],), place, (index,))
    for name, parameter in model.named_parameters():
        held.setdefault(id(parameter), Held(parameter, (clean_fqn(name),)))
    if optimizer is None:
        return held
    for group in optimizer.param_groups:
        names = part_states_of(innermost(optimizer), group)
        for parameter in group["params"] if names is not None else ():
            if id(parameter) in held:
                held[id(parameter)] = attrs.evolve(held[id(parameter)], part_states=names)
    return held


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps, inside those of accelerate and others that pass everything on to it."""
    for name in ("optimizer", "_optimizer"):
        inner = vars(optimizer).get(name)
        if isinstance(inner, torch.optim.Optimizer):
            return innermost(inner)
    return optimizer


@final
@attrs.frozen(eq=False)
class Holding:
    """The parameters that an optimizer holds, and the meaning of the keys of its state."""

    groups: tuple[tuple[dict[str, Any], tuple[Held, ...]], ...]
    """Each of its groups, and what the parameters in it stand for."""
    _by_name: Mapping[str, Held]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Self:
        """Return the parameters of `model` that `optimizer` holds.

        Raises:
            FlatParamError: if a parameter is not the model's, saying which.
        """
        held = held_parameters(model, optimizer)
        groups: list[tuple[dict[str, Any], tuple[Held, ...]]] = []
        number = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in held:
                    raise FlatParamError(
                        f"parameter {number} of the optimizer (shape {tuple(parameter.shape)}) is none of the model's; "
                        "create the optimizer from model.parameters() after sharding, and anew if a module was taken "
                        "out of the model, or shard with use_orig_params=True"
                    )
                number += 1
            groups.append((group, tuple(held[id(parameter)] for parameter in group["params"])))
        names = {clean_fqn(name): held[id(p)] for name, p in model.named_parameters() if id(p) in held}
        names |= {fqn: item for item in held.values() if not item.is_flat for fqn in item.fqns}
        return cls(tuple(groups), names)

    @property
    def by_group(self) -> list[Sequence[Held]]:
        """The parameters of the model that those of each group stand for."""
        return [found for _, found in self.groups]

    @property
    def items(self) -> list[Held]:
        """The parameters of the model that are held, in the order in which the optimizer numbers its own."""
        return [item for _, found in self.groups for item in found]

    @property
    def fqns(self) -> Iterator[str]:
        """List the names of the model's parameters, held or not, in the order of the model."""
        return (fqn for item in self._by_name.values() for fqn in item.fqns)

    def resolve(self, keys: Iterable[object]) -> dict[object, Held]:
        """Return the parameter that each of `keys` stands for, which is a number or a name; other keys are absent."""
        items = self.items
        found: dict[object, Held] = {}
        for key in keys:
            if isinstance(key, int) and 0 <= key < len(items):
                found[key] = items[key]
            elif isinstance(key, str) and clean_fqn(key) in self._by_name:
                found[key] = self._by_name[clean_fqn(key)]
        return found


def numbered(groups: Iterable[Sequence[object]]) -> Iterator[list[int]]:
    """For each group, the numbers that an optimizer gives to its parameters."""
    start = 0
    for group in groups:
        yield list(range(start, start + len(group)))
        start += len(group)


# Its parameter groups, with the names of parameters


def complete_groups(groups: Sequence[dict[str, Any]], held: Mapping[str, int]) -> None:
    """Add the names in `held` that no group has, since only other ranks hold elements of them, to their groups."""
    known = {name for group in groups for name in group["params"]}
    for fqn, number in held.items():
        if fqn not in known and number < len(groups):
            for key in {"params", "param_names"} & groups[number].keys():
                groups[number][key].append(fqn)


def with_names(group: Mapping[str, Any], items: Iterable[Held]) -> dict[str, Any]:
    """Return the group with the names of `items`, also if the optimizer was made from named parameters."""
    fqns = [fqn for item in items for fqn in item.fqns]
    return {**group, **{key: list(fqns) for key in ("params", "param_names") if key in group}}


_NAMES = frozenset({"params", "param_names"})
"""The entries of a group that name its parameters; the others are settings."""


def with_settings(item: Held, saved: State, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of `item` that the saved groups must have; one that no unit holds may have been in no optimizer."""
    known = {name for group in groups for name in group["params"]} | saved.keys()
    return [fqn for fqn in item.fqns if item.place is not None or fqn in known]


def settings_at(number: int, groups: Sequence[Mapping[str, Any]], holding: Holding) -> dict[str, Any]:
    """Return the hyperparameters of an optimizer's group `number` without parameters: those of the saved one there.

    If there are more saved groups or fewer, or it has parameters that are in another group now, there are none.
    """
    held = {fqn for item in holding.items for fqn in item.fqns}
    if len(groups) != len(holding.groups) or not held.isdisjoint(groups[number]["params"]):
        return {}
    return {key: value for key, value in groups[number].items() if key not in _NAMES}


def settings_of(names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The hyperparameters that the saved groups give to the parameters `names`, which must be the same for all."""
    if not names:
        return {}
    home = {name: group for group in groups for name in group["params"]}
    for name in names:
        if name not in home:
            raise FlatParamError(
                f"no parameter group of the saved optimizer state holds {name!r}; it was saved from "
                "a different model, or the optimizer then did not hold this parameter"
            )
    first = {key: value for key, value in home[names[0]].items() if key not in _NAMES}
    for name in names[1:]:
        other = home[name]
        # In this order, so that every rank names the same setting.
        for key in sorted(first.keys() | (other.keys() - _NAMES)):
            if not is_equal(first.get(key), other.get(key)):
                raise FlatParamError(
                    f"the saved optimizer state has {key}={first.get(key)!r} for {names[0]!r} and "
                    f"{other.get(key)!r} for {name!r}, which are in one parameter group now; give the optimizer the "
                    "groups that it had, with use_orig_params=True if a flat parameter joins them"
                )
    return first
