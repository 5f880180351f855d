"""How the checks of one session run: one after the other, and beside the others."""

from __future__ import annotations

import inspect
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from environments import ROOT, installed

if TYPE_CHECKING:
    import nox

__all__ = ["Beside", "in_turn"]


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


class Beside:
    """Programs of one process, which run one by one beside the checks that come between start and finish."""

    def __init__(self, **commands: Sequence[str]) -> None:
        """Take what Python is given, by name."""
        self.names = tuple(commands)
        self._commands = commands
        self._running: dict[str, Future[subprocess.CompletedProcess[str]]] = {}

    def start(self, session: nox.Session) -> None:
        """Start the checks that need one process, beside those that follow."""
        python, pool = str(installed(session).python), ThreadPoolExecutor(1)
        for name, command in self._commands.items():
            self._running[name] = pool.submit(
                subprocess.run,
                [python, *command],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        pool.shutdown(wait=False)

    def finish(self, session: nox.Session) -> None:
        """Wait for what ran beside the others, and say what it said."""
        if not self._running:
            session.error("They could not be started")
        done = {name: running.result() for name, running in self._running.items()}
        for name, process in done.items():
            session.log(f"{name}: {process.stdout}")
        failed = [name for name, process in done.items() if process.returncode]
        if failed:
            session.error(f"These failed: {', '.join(failed)}")
