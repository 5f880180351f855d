"""What ranks do with tensors of the CPU in tests elsewhere, done again with those of the simulated device.

A *job* is a function of such a test, which takes the group of its rank and other arguments, and those. Here everything
that it makes is on the device, by torch's default device, and the group is the device's. What it returns must be what it
returns on the CPU, over gloo, bit for bit, and the checker must find nothing.
"""

from __future__ import annotations

import itertools
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flatparam_simdev.races import find_races
from integration_tests.simulated.worlds import World, on_simulated

Job: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]


def wrong_with(jobs: Sequence[Job], ranks: int = 2) -> dict[str, list[str]]:
    """Of each job with which something is wrong, what; by its function and its arguments."""
    told = zip(jobs, *on_simulated(ranks, _do_all, jobs), strict=True)
    lines = {f"{function.__name__}{args}": [*itertools.chain(*of_ranks)] for (function, args), *of_ranks in told}
    return {name: wrong for name, wrong in lines.items() if wrong}


def _do_all(world: World, jobs: Sequence[Job]) -> list[list[str]]:
    """Do the jobs one after the other, on the device and on the CPU; what a rank of a world does."""
    return [_wrong_with(world, *job) for job in jobs]


def _wrong_with(world: World, function: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    from flatparam_simdev import device

    device.start_log()
    try:
        with world.device:
            value = to_cpu(_done(world.group, function, args))
    finally:
        records = device.stop_log()
    expected = to_cpu(_done(world.cpu_group, function, args))
    failed = [each.message for each in (value, expected) if isinstance(each, Failed)]
    lines = failed or [difference(value, expected)]
    return [line for line in [*lines, *map(str, find_races(records))] if line]


@attrs.frozen
class Failed:
    """A job that has raised, and what."""

    message: str


def _done(group: ProcessGroup, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What the job returns, or its error."""
    from flatparam_comm import ProcessGroupCollectives

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(ProcessGroupCollectives(group), *args)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return Failed(f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})")


def to_cpu(value: Any) -> Any:
    """The same with tensors of the CPU, in whatever they are."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, tuple | list):
        return type(value)(to_cpu(each) for each in value)
    if isinstance(value, Mapping):
        return {name: to_cpu(each) for name, each in value.items()}
    if attrs.has(type(value)) and any(isinstance(each, Tensor | tuple | list) for each in _fields(value).values()):
        return type(value)(**{name.lstrip("_"): to_cpu(each) for name, each in _fields(value).items()})
    return value


def difference(found: Any, expected: Any, where: str = "it") -> str:
    """Where two values are not the same, bit for bit, and how; empty where they are."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        is_same = found.dtype == expected.dtype and torch.equal(found, expected)
        return "" if is_same else f"{where} is {found}, not {expected}"
    if type(found) is not type(expected):
        return f"{where} is {found!r}, not {expected!r}"
    inside = _inside(expected)
    if inside is None:
        return "" if found == expected else f"{where} is {found!r}, not {expected!r}"
    others = _inside(found)
    assert others is not None
    if inside.keys() != others.keys():
        return f"{where} has {list(others)}, not {list(inside)}"
    lines = (difference(others[name], each, f"{where}.{name}") for name, each in inside.items())
    return next(filter(None, lines), "")


def _inside(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if attrs.has(type(value)) and any(isinstance(each, Tensor | tuple | list) for each in _fields(value).values()):
        return _fields(value)
    return None


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
