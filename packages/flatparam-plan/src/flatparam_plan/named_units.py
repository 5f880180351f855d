"""Units by the names of their modules: those that a model could have, and the policy that makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, final

import attrs
from torch import nn

from flatparam.api import ShardingStrategy
from flatparam.wrap import _Policy
from flatparam_core import clean_fqn
from flatparam_files import without_collector
from flatparam_plan.hollow.blank import Blank, without_compiler
from flatparam_plan.hollow.hollow_memory import HollowMemory
from flatparam_plan.training import Setup, TrainingProgram

_LISTS: Final = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward pass."""
_SMALL: Final = 10
"""A module outside of all blocks becomes a unit if it has at least this part of the largest block's elements."""
_FREES: Final = {
    ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy.FULL_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy.HYBRID_SHARD,
}
_KEEPS: Final = {freeing: keeping for keeping, freeing in _FREES.items()}


@final
@attrs.frozen(eq=False)
class NamedUnits(_Policy):
    """A policy that makes units of the modules with these names, and frees some of them after the forward pass."""

    frees: Mapping[str, bool]
    """For each unit's name, whether its parameters are freed after the forward pass."""
    forward_prefetch: int | None = None
    """The number of units that are gathered ahead in the forward pass, if that is not the wrapper's."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: Collection[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        # Of a module and its checkpoint wrapper, which have one name, it is the module inside.
        modules = {clean_fqn(name): module for name, module in root_module.named_modules()}
        asked = root_kwargs["sharding_strategy"]
        changed = {} if self.forward_prefetch is None else {"forward_prefetch": self.forward_prefetch}
        return {
            modules[name]: {
                **root_kwargs,
                "sharding_strategy": (_FREES if frees else _KEEPS).get(asked, asked),
                **changed,
            }
            for name, frees in self.frees.items()
            if modules[name] not in ignored_modules
        }

    @property
    def kept(self) -> list[str]:
        """The names of the units that are not freed after the forward pass."""
        return [name for name, frees in self.frees.items() if not frees]

    def __repr__(self) -> str:
        return f"NamedUnits({len(self.frees)} units, {len(self.kept)} kept after forward)"


@final
@attrs.frozen
class Outline:
    """The names of the modules that could be units."""

    blocks: tuple[str, ...]
    """The members of the outermost lists of modules; or the children of a model without lists."""
    rest: tuple[str, ...]
    """The other modules that are worth a unit, such as an embedding and a head."""
    parts: tuple[str, ...]
    """The children of the blocks, or the members of lists in them, that have parameters."""


def outline_of(program: TrainingProgram) -> tuple[Outline, nn.Module | None]:
    """The names of the modules that could be units; and a model that can be copied with fewer blocks, if there is one.

    The model is made in hollow memory, so any other model is gone then.
    """
    if program.template is not None:
        return _outline(program.template), program.template
    memory = HollowMemory()
    try:
        with without_collector():
            with memory, without_compiler(), Blank():
                model = program.build()
            found = _outline(model)
            template = model if all(each.is_meta for each in (*model.parameters(), *model.buffers())) else None
            del model
        return found, template
    finally:
        memory.close()


def with_blocks(program: TrainingProgram, setup: Setup) -> Setup:
    """Return the setup with each block as a unit, unless it says how to wrap."""
    if setup.wrap is not None:
        return setup
    return attrs.evolve(setup, wrap=NamedUnits(dict.fromkeys(outline_of(program)[0].blocks, True)))


def _outline(model: nn.Module) -> Outline:
    names = {module: clean_fqn(name) for name, module in model.named_modules()}
    holders = _holders(model)
    members = [each for each in _members(model) if _stands_alone(each, holders)]
    if not members:
        members = [each for each in _called(model) if _stands_alone(each, holders)]
    blocks = tuple(names[each] for each in members)
    within = {inner for each in members for inner in each.modules()}
    largest = max((_numel(each) for each in members), default=0)
    rest = tuple(
        names[each]
        for each in _outside(model, within)
        if _numel(each) * _SMALL >= largest and _stands_alone(each, holders)
    )
    parts = [
        names[part] for each in members for part in _members(each) or _called(each) if _stands_alone(part, holders)
    ]
    return Outline(blocks, rest, tuple(parts))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _members(module: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists in `module` that have several members of one class."""
    if isinstance(module, (*_LISTS, nn.Sequential)):
        children = [child for child in _called(module) if _numel(child)]
        if len({type(child) for child in children}) < len(children):
            return children
    found = [inner for child in module.children() for inner in _members(child)]
    return list(dict.fromkeys(found))


def _called(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in `module` that have a forward pass and parameters."""
    found: list[nn.Module] = []
    for child in module.children():
        found += _called(child) if isinstance(child, _LISTS) else [child] * (_numel(child) > 0)
    return list(dict.fromkeys(found))


def _outside(module: nn.Module, within: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the outermost modules in `module` that have parameters and contain nothing of `within`."""
    for child in module.children():
        if child in within or not _numel(child):
            continue
        if isinstance(child, _LISTS) or any(inner in within for inner in child.modules()):
            yield from _outside(child, within)
        else:
            yield child


def _holders(module: nn.Module) -> Counter[int]:
    """Return how often modules in `module` hold each parameter, by its id."""
    return Counter(
        id(parameter) for inner in module.modules() for parameter in inner._parameters.values() if parameter is not None
    )


def _stands_alone(module: nn.Module, holders: Counter[int]) -> bool:
    """Return whether nobody outside of `module` holds one of its parameters, as the two of a tied embedding do."""
    own = _holders(module)
    return bool(own) and all(holders[each] == count for each, count in own.items())
