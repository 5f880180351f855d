"""The half of a row that is about torch: its FSDP1 on two gloo processes, every row in one launch.

A half is a function of a test file that is called `torch_l<row>...`, or `ours_l<row>...` if it is ours that must run on
processes. It is called as `half(group)`, or, if it has a parameter `use_orig_params`, as `half(group, use_orig_params)`
with either value. Halves fail on every rank or on none, so that no rank waits for another one that has failed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

Half: TypeAlias = Callable[..., Any]
"""What one rank does; what it returns travels by pickle."""

Key: TypeAlias = tuple[str, bool | None]
"""The name of a half, and its value of use_orig_params, if it takes one."""


@attrs.frozen
class Raised:
    """The error of a half."""

    kind: str
    message: str


@attrs.frozen(eq=False)
class Outcomes:
    """What each rank returned from each half, or the error that it raised there."""

    of_ranks: list[Mapping[Key, Any]]

    def reports(self, half: Half, use_orig_params: bool | None = None) -> list[Any]:
        """What the half returned on each rank, or how it failed there."""
        return [outcomes[half.__name__, use_orig_params] for outcomes in self.of_ranks]

    def values(self, half: Half, use_orig_params: bool | None = None) -> list[Any]:
        """What the half returned on each rank; it must not have failed."""
        reports = self.reports(half, use_orig_params)
        assert not [report for report in reports if isinstance(report, Raised)], reports
        return reports

    def errors(self, half: Half, use_orig_params: bool | None = None) -> list[Raised]:
        """The half's error on each rank; it must have failed on all."""
        reports = self.reports(half, use_orig_params)
        assert all(isinstance(report, Raised) for report in reports), reports
        return reports

    def error(self, half: Half, use_orig_params: bool | None = None) -> str:
        """The half's error, which must be the same on all ranks."""
        (error,) = {f"{each.kind}: {each.message}" for each in self.errors(half, use_orig_params)}
        return error

    def assert_raised(self, half: Half, kind: str, *words: str) -> None:
        """Demand that the half raised, on every rank, an error of this kind with one of these texts in it."""
        for error in self.errors(half):
            assert error.kind == kind, error
            assert any(each in error.message for each in words), error


def fsdp1(module: nn.Module, *units: type[nn.Module], **arguments: Any) -> FullyShardedDataParallel:
    """torch's wrapper on the CPU, with the modules of these classes as units."""
    if units:
        arguments["auto_wrap_policy"] = ModuleWrapPolicy(set(units))
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **arguments)


def halves_of(modules: Iterable[ModuleType]) -> list[Half]:
    """The halves of these test files, in an order that is the same in every process."""
    found = {
        half
        for module in modules
        for name, half in vars(module).items()
        if name.startswith(("torch_l", "ours_l")) and half.__module__ == module.__name__
    }
    return sorted(found, key=lambda half: half.__name__)


def launch(halves: list[Half]) -> Outcomes:
    """Run all halves, one after the other, in one pair of processes."""
    return Outcomes(run_processes(2, _attempt_all, halves))


def _attempt_all(group: Collectives, halves: list[Half]) -> dict[Key, Any]:
    return {
        (half.__name__, use_orig_params): _attempt(half, group, use_orig_params)
        for half in halves
        for use_orig_params in _exposures(half)
    }


def _exposures(half: Half) -> Iterator[bool | None]:
    yield from (False, True) if "use_orig_params" in inspect.signature(half).parameters else (None,)


def _attempt(half: Half, group: Collectives, use_orig_params: bool | None) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so at every turn
        try:
            return half(group) if use_orig_params is None else half(group, use_orig_params)
        except Exception as error:
            return Raised(type(error).__name__, str(error))
