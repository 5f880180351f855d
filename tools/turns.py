"""How the checks of one session run: one after the other, and beside the others."""

from __future__ import annotations

import inspect
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from environments import ROOT, shared

if TYPE_CHECKING:
    import nox

__all__ = ["Beside", "Program", "in_turn"]


def in_turn(session: nox.Session, checks: Mapping[str, Callable[[nox.Session], None]]) -> None:
    """Run each check, whether those before it failed or not, and say how long each took."""
    outcomes: dict[str, str] = {}
    failed: list[str] = []
    for number, (name, check) in enumerate(checks.items(), start=1):
        about = check.__doc__ if inspect.isroutine(check) else None
        session.log(f"{number}/{len(checks)} {name}: {(about or name).splitlines()[0]}")
        started = time.monotonic()
        try:
            check(session)
        except Exception as error:  # nox's own; the next check runs all the same
            session.warn(f"{name} failed: {error}")
            failed.append(name)
        outcomes[name] = f"{'FAILED' if name in failed else 'ok':<7} {time.monotonic() - started:6.1f} s"
    for name, outcome in outcomes.items():
        session.log(f"{name:<12} {outcome}")
    if failed:
        session.error(f"Not green: {', '.join(failed)}")


@dataclass(frozen=True)
class Program:
    """What Python is given, and variables of its environment; None takes one away."""

    arguments: Sequence[str]
    variables: Mapping[str, str | None] = field(default_factory=dict)

    def run(self, python: str) -> tuple[subprocess.CompletedProcess[str], float]:
        """Run it in the root of the checkout; return what came of it, with its output, and the seconds it took."""
        environment = {**os.environ, **self.variables}
        started = time.monotonic()
        done = subprocess.run(
            [python, *self.arguments],
            cwd=ROOT,
            env={name: value for name, value in environment.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done, time.monotonic() - started


class Beside:
    """Programs that run `workers` at once, in this order, beside the checks that come between start and finish."""

    def __init__(self, programs: Mapping[str, Program], workers: int = 1) -> None:
        """Take the programs by name."""
        self.name = " ".join(programs)
        self._programs = programs
        self._workers = workers
        self._running: dict[Future[tuple[subprocess.CompletedProcess[str], float]], str] = {}

    def start(self, session: nox.Session) -> None:
        """Start the programs, in .venv as it is."""
        python, pool = str(shared(session).python), ThreadPoolExecutor(self._workers)
        self._running = {pool.submit(program.run, python): name for name, program in self._programs.items()}
        pool.shutdown(wait=False)

    def finish(self, session: nox.Session) -> None:
        """Wait for all of them, and say what each said as soon as it has ended; fail the session if one failed."""
        if not self._running:
            session.error("They could not be started")
        failed = []
        try:
            for done in as_completed(self._running):
                name, (process, seconds) = self._running[done], done.result()
                session.log(f"{name}, {seconds:.1f} s: {process.stdout}")
                failed += [name] if process.returncode else []
        except KeyboardInterrupt:
            for waiting in self._running:
                waiting.cancel()
            raise
        if failed:
            session.error(f"These failed: {', '.join(failed)}")
