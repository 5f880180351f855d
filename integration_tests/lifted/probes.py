"""One half of every test here: what torch's FullyShardedDataParallel does, on two processes over gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

Probe = Callable[[Collectives], Any]
"""What a rank does with torch's FSDP1, and what it reports; where it raises, that is what it reports."""

Saw = dict[str, list[Any]]
"""By the name of a probe, what each rank reports."""


@attrs.frozen
class Raised:
    """An exception that came out of a probe."""

    kind: str
    message: str


def ask_torch(*probes: Probe) -> Saw:
    """Run all probes, one after the other, in one pair of processes."""
    of_ranks = run_processes(2, _run, probes)
    return {probe.__name__: [reports[probe.__name__] for reports in of_ranks] for probe in probes}


def _run(group: Collectives, probes: tuple[Probe, ...]) -> dict[str, Any]:
    return {probe.__name__: _report(probe, group) for probe in probes}


def _report(probe: Probe, group: Collectives) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so at every turn
        try:
            return probe(group)
        except Exception as error:
            return Raised(type(error).__name__, str(error))


def assert_raised(reports: list[Any], kind: str, *words: str) -> None:
    """Demand that the probe raised, on both ranks, an error of this kind with these words, or one of these, in it."""
    assert len(reports) == 2
    for report in reports:
        assert isinstance(report, Raised), report
        assert report.kind == kind, report
        assert any(each in report.message for each in words), report


def wrapped(module: nn.Module, **arguments: Any) -> FullyShardedDataParallel:
    """`module` wrapped by torch on the CPU."""
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **arguments)
