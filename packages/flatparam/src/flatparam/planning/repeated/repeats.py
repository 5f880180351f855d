"""Blocks that repeat: runs of equal modules in a model, and the same model with fewer of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import attrs
import torch
from torch import nn

from flatparam.planning.program import TrainingProgram
from flatparam.planning.setup import Setup
from flatparam.planning.units import NamedUnits
from flatparam_core import clean_fqn

__all__ = ["SHORT", "Place", "Run", "Shortened", "runs_of", "shortened"]

SHORT: Final = 6
"""The blocks of a run that are rehearsed: what happens near its ends does not happen in its middle."""
_MORE: Final = 2
"""The blocks by which a second rehearsal is longer, to see what repeats."""
_SCALARS: Final = (int, float, str, bool, type(None), tuple, torch.dtype)

Place: TypeAlias = "tuple[int, int, str] | str"
"""A unit of a run: its number, that of the block in it, and the unit's name in the block; or a name."""


@final
@attrs.frozen
class Run:
    """Neighbouring blocks of a list of modules that are equal: the same modules, tensors and choices."""

    container: str
    """The name of the list."""
    start: int
    stop: int

    @property
    def count(self) -> int:
        """The number of its blocks."""
        return self.stop - self.start


def runs_of(model: nn.Module, setup: Setup) -> list[Run]:
    """The runs of equal blocks that are long enough to be shortened, in the order of the model.

    A block's parameters are all in units that lie in it; otherwise another unit's size depends on their number.
    """
    if not _is_known(setup.wrap):
        return []
    choices = _Choices.of(setup)
    shared = _shared(model)
    found: list[Run] = []
    covered: set[nn.Module] = set()
    for name, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)) or container in covered:
            continue
        runs = list(_runs_in(name, container, choices, shared))
        if runs:
            covered.update(inner for child in container for inner in child.modules())
        found += runs
    return found


def _is_known(wrap: Any) -> bool:
    """Whether units are chosen by names or classes, so that fewer blocks have the same units."""
    if isinstance(wrap, (NamedUnits, str)):
        return True
    return isinstance(wrap, tuple) and all(isinstance(each, str) for each in wrap)


@final
@attrs.frozen(eq=False)
class _Choices:
    """What a setup says of modules, by their names or classes."""

    frees: Mapping[str, bool]
    classes: frozenset[str]
    checkpointed: frozenset[str]

    @classmethod
    def of(cls, setup: Setup) -> _Choices:
        wrap = setup.wrap
        checkpointed = frozenset(setup.checkpointing)
        if isinstance(wrap, NamedUnits):
            return cls(wrap.frees, frozenset(), checkpointed)
        return cls({}, frozenset((wrap,) if isinstance(wrap, str) else wrap), checkpointed)

    def of_module(self, name: str, module: nn.Module) -> tuple[Any, ...]:
        """What is chosen for one module."""
        kind = type(module).__name__
        return (self.frees.get(name), kind in self.classes, name in self.checkpointed)

    def is_unit(self, name: str, module: nn.Module) -> bool:
        return name in self.frees or type(module).__name__ in self.classes


def _shared(model: nn.Module) -> set[int]:
    """The ids of the parameters that several modules have."""
    seen: set[int] = set()
    found: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (found if id(parameter) in seen else seen).add(id(parameter))
    return found


def _runs_in(
    name: str, container: nn.ModuleList | nn.Sequential, choices: _Choices, shared: set[int]
) -> Iterator[Run]:
    children = list(container)
    if len(children) <= SHORT + _MORE or len(set(map(id, children))) < len(children):
        return
    shapes = [
        _shape(_joined(name, str(number)), child, number, choices, shared)
        for number, child in enumerate(children)
    ]
    start = 0
    for number in range(1, len(children) + 1):
        if number == len(children) or shapes[number] != shapes[start]:
            if number - start > SHORT + _MORE and shapes[start] is not None:
                yield Run(name, start, number)
            start = number


def _shape(name: str, block: nn.Module, number: int, choices: _Choices, shared: set[int]) -> Any:
    """What is equal for blocks that do the same, or `None` if a block does not stand alone."""
    found: list[Any] = []
    covered: set[nn.Module] = set()
    for inner, module in block.named_modules():
        whole = _joined(name, clean_fqn(inner)) if inner else name
        if choices.is_unit(whole, module):
            covered.update(module.modules())
        own = [each for each in module._parameters.values() if each is not None]
        if any(id(each) in shared for each in own) or (own and module not in covered):
            return None
        found.append(
            (inner, type(module), choices.of_module(whole, module), module.training, _facts(module, number))
        )
    return tuple(found)


def _facts(module: nn.Module, number: int) -> tuple[Any, ...]:
    """The tensors and plain attributes of a module; a number that counts the blocks is told from that of the block."""
    tensors = tuple(
        (name, None if each is None else (each.shape, each.dtype, each.device, each.requires_grad))
        for name, each in (*module._parameters.items(), *module._buffers.items())
    )
    plain = tuple(
        (key, type(value), value - number if type(value) is int and key.endswith(_COUNTS) else value)
        for key, value in vars(module).items()
        if isinstance(value, _SCALARS) and not key.startswith("_")
    )
    hooks = tuple(len(getattr(module, each)) for each in _HOOKS)
    return (tensors, plain, hooks)


_COUNTS: Final = ("idx", "index", "number", "layer_id")
"""How the names of attributes end that say which block it is."""
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


@final
@attrs.frozen(eq=False)
class Shortened:
    """A program, and its setup, with fewer blocks in some runs."""

    program: TrainingProgram
    setup: Setup
    runs: tuple[Run, ...]
    counts: tuple[int, ...]
    """How many blocks are left of each run."""
    _numbers: Mapping[str, Sequence[tuple[int, int]]]
    """For each list of modules, what its members are: a run and a number in it, or -1 and their old number."""

    def place(self, name: str) -> Place:
        """What a unit of this name is."""
        for container, numbers in self._numbers.items():
            number, inner = _inside(name, container)
            if number is not None:
                run, at = numbers[number]
                if run >= 0:
                    return (run, at, inner)
                return _joined(_joined(container, str(at)), inner) if inner else _joined(container, str(at))
        return name


def _inside(name: str, container: str) -> tuple[int | None, str]:
    """The number of a list's member that a module lies in, and its name there."""
    prefix = f"{container}." if container else ""
    if not name.startswith(prefix):
        return None, ""
    number, _, inner = name[len(prefix) :].partition(".")
    return (int(number), inner) if number.isdecimal() else (None, "")


def shortened(
    program: TrainingProgram,
    template: nn.Module,
    setup: Setup,
    runs: Sequence[Run],
    longer: int | None = None,
) -> Shortened:
    """The program with few blocks of each run; with some more of the run with the number `longer`."""
    counts = tuple(SHORT + (_MORE if number == longer else 0) for number in range(len(runs)))
    kept: dict[str, list[int]] = {}
    numbers: dict[str, list[tuple[int, int]]] = {}
    modules = dict(template.named_modules())
    for container in dict.fromkeys(run.container for run in runs):
        kept[container], numbers[container] = [], []
        for old in range(len(modules[container])):
            found = [
                n for n, run in enumerate(runs) if run.container == container and run.start <= old < run.stop
            ]
            if not found:
                place = (-1, old)
            elif (at := old - runs[found[0]].start) < counts[found[0]]:
                place = (found[0], at)
            else:
                continue
            kept[container].append(old)
            numbers[container].append(place)
    names = _FewerNames(kept)
    build = functools.partial(_with_fewer, program, template, kept)
    return Shortened(attrs.evolve(program, build=build), names.of_setup(setup), tuple(runs), counts, numbers)


@final
@attrs.frozen(eq=False)
class _FewerNames:
    """The names of modules among fewer blocks."""

    kept: Mapping[str, Sequence[int]]

    def of_setup(self, setup: Setup) -> Setup:
        wrap = setup.wrap
        if isinstance(wrap, NamedUnits):
            frees = {new: wrap.frees[old] for old, new in self._pairs(wrap.frees)}
            wrap = attrs.evolve(wrap, frees=frees)
        return attrs.evolve(
            setup, wrap=wrap, checkpointing=tuple(new for _, new in self._pairs(setup.checkpointing))
        )

    def _pairs(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """The names that are left, old and new."""
        places = {
            container: {old: new for new, old in enumerate(olds)} for container, olds in self.kept.items()
        }
        for name in names:
            new = name
            for container, at in places.items():
                number, inner = _inside(name, container)
                if number is not None:
                    if number not in at:
                        break
                    new = _joined(container, str(at[number])) + (f".{inner}" if inner else "")
            else:
                yield name, new


def _with_fewer(
    program: TrainingProgram, template: nn.Module, kept: Mapping[str, Sequence[int]]
) -> nn.Module:
    """A copy of the model without the other members of its lists, which are not copied."""
    memo: dict[int, Any] = {}
    modules = dict(template.named_modules())
    for container, numbers in kept.items():
        remaining = set(numbers)
        for number, child in enumerate(modules[container].children()):
            if number not in remaining:
                memo[id(child)] = None
    made = program.copies(template, memo)
    copies = dict(made.named_modules())
    for container, numbers in kept.items():
        members = copies[container]._modules
        left = [members[str(number)] for number in numbers]
        members.clear()
        for number, child in enumerate(left):
            members[str(number)] = child
            if child is not None:
                _renumber(child, numbers[number], number)
    return made


def _renumber(block: nn.Module, old: int, new: int) -> None:
    """Give a block that knows its number the new one."""
    for module in block.modules():
        for key, value in list(vars(module).items()):
            counts = type(value) is int and key.endswith(_COUNTS) and not key.startswith("_")
            if counts and value - old in (0, 1):
                setattr(module, key, value - old + new)
