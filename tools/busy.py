"""Keep the machine busy while a command runs: `python tools/busy.py 8 -- nox -s alone`.

Starts so many processes that only count, runs the command, ends them however the command ends, and exits with its
status. No test may depend on the speed of the machine, and this is how to try. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

#: It ends when its parent has: also where that was killed, and could not end it.
COUNT: Final = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


def main(arguments: Sequence[str]) -> int:
    """Run what the command line says; returns the command's exit status, or 128 + the signal that ended it."""
    parser = argparse.ArgumentParser(
        prog="busy.py", description="Run a command beside processes that keep the machine busy."
    )
    parser.add_argument("processes", type=int, help="how many processes keep it busy")
    parser.add_argument("command", nargs="+", help="what to run beside them, behind --")
    options = parser.parse_args(arguments)
    with busy(options.processes):
        status = _run(options.command)
    return status if status >= 0 else 128 - status


@contextmanager
def busy(processes: int) -> Iterator[list[int]]:
    """Have so many busy processes inside; yields their ids."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            # In a session of its own: Ctrl-C on the terminal is for the command.
            command = [sys.executable, "-I", "-S", "-c", COUNT, str(os.getpid())]
            started.append(subprocess.Popen(command, start_new_session=True))
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def _run(command: Sequence[str]) -> int:
    """Run it to its end. A terminal's Ctrl-C reaches it directly, and SIGTERM through here; to stop is up to it."""
    with subprocess.Popen(command) as running:
        handlers = {
            signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: running.terminate()),
        }
        try:
            return running.wait()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
