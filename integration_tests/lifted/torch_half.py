"""The half of a row that is about torch: its FSDP1 on two gloo processes, every row in one launch.

A test file lists the functions that are to run there in `HALVES`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

Half: TypeAlias = Callable[[Collectives, bool], Any]
"""What one rank does, with this value of use_orig_params; what it returns travels by pickle."""


@attrs.frozen(eq=False)
class Outcome:
    """What a half came to on one rank: its value, or the type and the message of its error."""

    value: Any = None
    error: str | None = None


@attrs.frozen(eq=False)
class Outcomes:
    """What the halves came to, on each rank."""

    of_ranks: list[Mapping[tuple[str, bool], Outcome]]

    def values(self, half: Half, use_orig_params: bool) -> list[Any]:
        """What the half returned on each rank; it must not have failed."""
        outcomes = self._of(half, use_orig_params)
        assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
        return [outcome.value for outcome in outcomes]

    def error(self, half: Half, use_orig_params: bool) -> str:
        """The half's error, with which it must have failed on all ranks."""
        found = {outcome.error for outcome in self._of(half, use_orig_params)}
        assert len(found) == 1, found
        (error,) = found
        assert error is not None, "it did not fail"
        return error

    def _of(self, half: Half, use_orig_params: bool) -> list[Outcome]:
        return [outcomes[half.__name__, use_orig_params] for outcomes in self.of_ranks]


def fsdp1(module: nn.Module, *units: type[nn.Module], **arguments: Any) -> FullyShardedDataParallel:
    """torch's wrapper on the CPU, with the modules of these classes as units."""
    policy = ModuleWrapPolicy(set(units)) if units else None
    return FullyShardedDataParallel(
        module, auto_wrap_policy=policy, device_id=torch.device("cpu"), **arguments
    )


def halves() -> Iterator[Half]:
    """Those of every test file beside this one."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"integration_tests.lifted.{file.stem}")
        yield from getattr(module, "HALVES", ())  # the others have probes; see `probes`


def attempt_all(group: Collectives) -> dict[tuple[str, bool], Outcome]:
    """This rank's outcomes. Halves fail on every rank or on none, so that none leaves another waiting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's wrapper is deprecated, and says so at every turn
        return {
            (half.__name__, use_orig_params): _attempt(half, group, use_orig_params)
            for half in halves()
            for use_orig_params in (False, True)
        }


def _attempt(half: Half, group: Collectives, use_orig_params: bool) -> Outcome:
    try:
        return Outcome(value=half(group, use_orig_params))
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {error}")


def launch() -> Outcomes:
    """Run every half on two processes."""
    return Outcomes(run_processes(2, attempt_all))
