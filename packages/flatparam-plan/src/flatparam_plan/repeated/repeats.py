"""Blocks that repeat: runs of equal modules in a model, and the same model with fewer of them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import attrs
import torch
from torch import nn

from flatparam_core import clean_fqn
from flatparam_plan.named_units import NamedUnits
from flatparam_plan.training import Setup, TrainingProgram

SHORT: Final = 6
"""The blocks of a run that are rehearsed: what happens near its ends does not happen in its middle."""
_MORE: Final = 2
"""The blocks by which a second rehearsal is longer, to see what repeats."""
_FEWEST: Final = 3
"""The first block, one that stands for all between, and the last."""
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


@final
@attrs.frozen
class _BlockPart:
    """A module in a block."""

    inner: str
    whole: str
    """Its name in the model."""
    kind: str
    has_parameters: bool
    facts: tuple[Any, ...]
    """The key that blocks of the same behaviour share."""


@final
@attrs.frozen(eq=False)
class Template:
    """A model that stays as it is, best on the meta device, and what there is to know of its modules."""

    model: nn.Module
    modules: Mapping[str, nn.Module] = attrs.field(init=False, repr=False)
    shared: Collection[int] = attrs.field(init=False, repr=False)
    """The ids of the parameters that several modules have."""
    _blocks: dict[str, list[_BlockPart] | None] = attrs.field(init=False, repr=False, factory=dict)

    @modules.default
    def _modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules())

    @shared.default
    def _shared(self) -> set[int]:
        seen: set[int] = set()
        found: set[int] = set()
        for module in self.modules.values():
            for parameter in module._parameters.values():
                if parameter is not None:
                    (found if id(parameter) in seen else seen).add(id(parameter))
        return found

    def parts_of(self, name: str, block: nn.Module, number: int) -> list[_BlockPart] | None:
        """Return the modules of the block with this name and number in its list; `None` if it shares a parameter."""
        if name not in self._blocks:
            found: list[_BlockPart] | None = []
            for inner, module in block.named_modules():
                own = [each for each in module._parameters.values() if each is not None]
                if found is None or any(id(each) in self.shared for each in own):
                    found = None
                    break
                whole = _joined(name, clean_fqn(inner)) if inner else name
                facts = (inner, type(module), module.training, _facts(module, number))
                found.append(_BlockPart(inner, whole, type(module).__name__, bool(own), facts))
            self._blocks[name] = found
        return self._blocks[name]


def runs_of(template: Template, setup: Setup, least: int = SHORT + _MORE) -> list[Run]:
    """Return the runs of more than `least` equal blocks, in the order of the model.

    A block's parameters are all in units that lie in it; otherwise another unit's size depends on their number.
    """
    if not _is_known(setup.wrap):
        return []
    choices = _Choices.of(setup)
    found: list[Run] = []
    covered: set[nn.Module] = set()
    for name, container in template.modules.items():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)) or container in covered:
            continue
        runs = list(_runs_in(name, container, choices, template, least))
        if runs:
            covered.update(inner for child in container for inner in child.modules())
        found += runs
    return found


def _is_known(wrap: Any) -> bool:
    """Return whether units are chosen by names or classes, so that fewer blocks have the same units."""
    if isinstance(wrap, (NamedUnits, str)):
        return True
    return isinstance(wrap, tuple) and all(isinstance(each, str) for each in wrap)


@final
@attrs.frozen(eq=False)
class _Choices:
    """The settings of modules in a setup, by their names or classes."""

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

    def of_part(self, part: _BlockPart) -> tuple[Any, ...]:
        """Return the choices for one module."""
        return (self.frees.get(part.whole), part.kind in self.classes, part.whole in self.checkpointed)

    def is_unit(self, part: _BlockPart) -> bool:
        return part.whole in self.frees or part.kind in self.classes


def _runs_in(
    name: str, container: nn.ModuleList | nn.Sequential, choices: _Choices, template: Template, least: int
) -> Iterator[Run]:
    children = list(container)
    if len(children) <= least or len(set(map(id, children))) < len(children):
        return
    shapes = [
        _shape(template.parts_of(_joined(name, str(number)), child, number), choices)
        for number, child in enumerate(children)
    ]
    start = 0
    for number in range(1, len(children) + 1):
        if number == len(children) or shapes[number] != shapes[start]:
            if number - start > least and shapes[start] is not None:
                yield Run(name, start, number)
            start = number


def _shape(parts: Sequence[_BlockPart] | None, choices: _Choices) -> Any:
    """Return a key that is equal for blocks of the same behaviour, or `None` if a block does not stand alone."""
    if parts is None:
        return None
    found: list[Any] = []
    units: list[str] = []
    for part in parts:
        if choices.is_unit(part):
            units.append(f"{part.inner}." if part.inner else "")
        if part.has_parameters and not any(f"{part.inner}.".startswith(unit) for unit in units):
            return None
        found.append((part.facts, choices.of_part(part)))
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
        """Return the place of a unit of this name."""
        for container, numbers in self._numbers.items():
            number, inner = _inside(name, container)
            if number is not None:
                run, at = numbers[number]
                if run >= 0:
                    return (run, at, inner)
                return _joined(_joined(container, str(at)), inner) if inner else _joined(container, str(at))
        return name


def _inside(name: str, container: str) -> tuple[int | None, str]:
    """Return the number of a list's member that a module lies in, and its name there."""
    prefix = f"{container}." if container else ""
    if not name.startswith(prefix):
        return None, ""
    number, _, inner = name[len(prefix) :].partition(".")
    return (int(number), inner) if number.isdecimal() else (None, "")


def shortened(
    program: TrainingProgram,
    template: Template,
    setup: Setup,
    runs: Sequence[Run],
    longer: int | None = None,
    keep: int = SHORT,
) -> Shortened:
    """Return the program with `keep` blocks of each run; with some more of the run with the number `longer`."""
    counts = tuple(keep + (_MORE if number == longer else 0) for number in range(len(runs)))
    kept: dict[str, list[int]] = {}
    numbers: dict[str, list[tuple[int, int]]] = {}
    modules = template.modules
    for container in dict.fromkeys(run.container for run in runs):
        kept[container], numbers[container] = [], []
        for old in range(len(modules[container]._modules)):
            found = [n for n, run in enumerate(runs) if run.container == container and run.start <= old < run.stop]
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


def with_few_blocks(program: TrainingProgram, setup: Setup) -> tuple[TrainingProgram, Setup]:
    """Return the program and its setup with the first, one more and the last of blocks that repeat; or as they are."""
    template = Template(program.build() if program.template is None else program.template)
    runs = runs_of(template, setup, _FEWEST)
    if not runs:
        return program, setup
    short = shortened(program, template, setup, runs, keep=_FEWEST)
    return short.program, short.setup


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
        return attrs.evolve(setup, wrap=wrap, checkpointing=tuple(new for _, new in self._pairs(setup.checkpointing)))

    def _pairs(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield the names that are left, old and new."""
        places = {container: {old: new for new, old in enumerate(olds)} for container, olds in self.kept.items()}
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


def _with_fewer(program: TrainingProgram, template: Template, kept: Mapping[str, Sequence[int]]) -> nn.Module:
    """Return a copy of the model without the other members of its lists, which are not copied."""
    memo: dict[int, Any] = {}
    modules = template.modules
    for container, numbers in kept.items():
        remaining = set(numbers)
        for number, child in enumerate(modules[container].children()):
            if number not in remaining:
                memo[id(child)] = None
    made = program.copies(template.model, memo)
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
