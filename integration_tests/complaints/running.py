"""Rows on ranks that are processes, and the verdict on what they found."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, Final

import attrs

from flatparam_comm import Collectives, RankDied, WorldTimeout
from flatparam_comm.testing import run_processes
from integration_tests.complaints.rows import library, load_all
from integration_tests.complaints.shared import Leak, Off, Work

__all__ = ["Verdict", "failed", "judged", "run_alone", "run_rows", "worst"]

#: Seconds for a collective, after which the ranks would wait for ever.
_LIMIT: Final = 20.0
#: From the best verdict to the worst.
_KINDS: Final = ("right", "refused", "slow", "leak", "wrong", "hang", "crash")
#: Bytes a step: less than this is the noise of the allocators.
_NOISE: Final = 1000


@attrs.frozen
class Verdict:
    """What a row found: one of `_KINDS`, and the figure or the error."""

    kind: str
    detail: str = ""


def run_alone(report: str, side: str) -> Verdict:
    """Run a row in a world of its own, which may hang or die."""
    try:
        return run_rows([report], side, timeout=10 * _LIMIT, pg_timeout=_LIMIT)[report]
    except WorldTimeout:
        return Verdict("hang")
    except RankDied as error:
        return Verdict("crash", error.signal or f"exit code {error.exitcode}")


def run_rows(reports: Sequence[str], side: str, **limits: float) -> dict[str, Verdict]:
    """Run rows that need the same number of ranks, one after the other on the same ranks."""
    (ranks,) = {load_all()[report].ranks for report in reports}
    of_ranks = run_processes(ranks, _rank, list(reports), side, **limits)
    return {report: worst([each[report] for each in of_ranks]) for report in reports}


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of the ranks' verdicts, and the first of these."""
    return max(verdicts, key=lambda verdict: _KINDS.index(verdict.kind))


def _rank(comm: Collectives, reports: Sequence[str], side: str) -> dict[str, Verdict]:
    rows = load_all()
    with library(side) as fsdp:
        return {report: _verdict(rows[report].program, fsdp, comm.rank) for report in reports}


def _verdict(program: Any, fsdp: Any, rank: int) -> Verdict:
    try:
        return judged(program(fsdp, rank))
    except Exception as error:
        return failed(error)


def judged(found: Off | Leak | Work) -> Verdict:
    """The verdict on a figure."""
    if isinstance(found, Leak):
        return Verdict("leak", f"{found.nbytes:,} bytes a step") if found.nbytes >= _NOISE else Verdict("right")
    if isinstance(found, Work):
        return Verdict("slow", f"{found.times:.1f} times the calls") if found.times > 2 else Verdict("right")
    if found.by <= found.most:
        return Verdict("right")
    return Verdict("wrong", f"off by {100 * found.by:.2g} %")


def failed(error: Exception) -> Verdict:
    """The verdict on an error: what a library raises in words of its own, and not by an assertion, is a refusal."""
    kind, text = type(error), f"{error}"
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    is_torchs = "/distributed/fsdp/" in where and isinstance(error, (ValueError, TypeError, NotImplementedError))
    if kind.__module__.startswith("flatparam") or "/flatparam" in where or is_torchs:
        return Verdict("refused", kind.__name__)
    if "Timed out" in text or "Connection closed by peer" in text:  # whose rank had waited long enough
        return Verdict("hang")
    return Verdict("crash", kind.__name__)
