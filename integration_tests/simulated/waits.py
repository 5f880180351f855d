"""Where the host stands still: ``python -m integration_tests.simulated.waits`` prints it for each configuration."""

from __future__ import annotations

import collections
import contextlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

OWN: Final = Path(__file__).parent
LIBRARIES: Final = ("flatparam", "torch/distributed/fsdp", "torch/nn/utils/clip_grad")
"""What stands in the names of the files of a library."""
PASSED_ON: Final = "streams.py"
"""A file that waits for others."""
DEVICE: Final = "flatparam_simdev"
"""The device itself, and the world that calls everything, are no library."""


@attrs.frozen
class Wait:
    """The host stands still.

    Attributes:
        what: the call that the device sees.
        place: the innermost line of a library that it came from, or of these programs, where there is none.
    """

    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} at {self.place}"


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[str, Wait]]]:
    """What the host waits for inside, while there is a log: the phase that was marked last, and the wait."""
    from flatparam_simdev import device

    found: list[tuple[str, Wait]] = []
    device.on_wait_of_host(lambda what: found.append((device.phase(), Wait(what, _place()))))
    try:
        yield found
    finally:
        device.on_wait_of_host(None)


def _place() -> str:
    frames = [f for f in traceback.extract_stack() if f.filename != __file__ and DEVICE not in f.filename]
    frames = [f for f in frames if Path(f.filename).name != PASSED_ON]
    library = [f for f in frames if any(word in f.filename for word in LIBRARIES)]
    own = [f for f in frames if Path(f.filename).parent == OWN]
    frame = (library or own or frames)[-1]
    path = Path(frame.filename)
    return f"{path.parent.name}/{path.name}:{frame.lineno} {frame.name}"


def by_phase(waits: Sequence[tuple[str, Wait]], step: str) -> dict[str, list[str]]:
    """Of the phases of a step, by the word after its name: where the host stood still."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for phase, wait in waits:
        if phase.startswith(f"{step} "):
            found[phase.removeprefix(step).split()[0]].append(str(wait))
    return dict(found)


def main() -> None:
    """Print every wait of the third step."""
    from integration_tests.simulated.programs import run
    from integration_tests.simulated.test_waits import ROWS
    from integration_tests.simulated.worlds import on_simulated

    outcomes = on_simulated(2, run, [row.program for row in ROWS.values()])[0]
    for name, outcome in zip(ROWS, outcomes, strict=True):
        found = by_phase(outcome.waits, "step 2")
        print(f"{name}: {sum(map(len, found.values()))}")
        for phase, places in found.items():
            for place in places:
                print(f"    {phase}: {place}")


if __name__ == "__main__":
    main()
