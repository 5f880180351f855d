"""The tests that need a GPU, in a process of pytest's own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from matrix.main import counts

from .facts import Facts
from .measurement import Measurement
from .place import Plan

ROOT: Final = Path(__file__).resolve().parents[2]
TINY: Final = "integration_tests/gpu/test_nccl_alone.py"
TO_REPORT: Final = 10.0
"""Seconds to write the report in, for who is interrupted."""


def places() -> list[str]:
    """The files that have such a test, and the folders whose fixtures make them."""
    files = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("integration_tests/**/*.py")]
    found = {
        file.parent if file.name == "conftest.py" else file
        for file in files
        if "mark.gpu" in file.read_text(encoding="utf-8")
    }
    return sorted(str(each.relative_to(ROOT)) for each in found if not found & set(each.parents))


def _run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    report = Path(plan.out, "tests.xml").resolve()
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    command += [TINY] if plan.tiny else places()
    with (
        Path(plan.out, "tests.log").open("wb") as log,
        start(command, cwd=ROOT, stdout=log, stderr=log) as process,
    ):
        end(process, limit * plan.patience - TO_REPORT)
    if not report.exists():
        raise RuntimeError(f"pytest ended with {process.returncode} and left no report: see tests.log")
    found = dict(counts(report))
    return {**found, "same": not found["failed"]}


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process that `end` can interrupt, also where a shell runs this one in the background, without interrupts."""
    return subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait so long for it; if that is too short, interrupt it, so that it reports what it has done."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TO_REPORT)
        process.kill()


MEASUREMENTS: Final = (
    Measurement(
        "tests",
        "pytest of the tests marked `gpu`. Those that have not run when the time is over are not counted.",
        90,
        150,
        _run,
        decides=True,
    ),
)
