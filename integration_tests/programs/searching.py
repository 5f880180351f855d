"""The search for a program that is not the same sharded and unsharded: a part of it in the tests, long runs by hand.

python -m integration_tests.programs.searching --examples 5000
python -m integration_tests.programs.searching --minutes 30
python -m integration_tests.programs.searching --of saving
python -m integration_tests.programs.searching --of processes
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck

from flatparam_comm.testing import be_patient
from integration_tests.programs.axes import AXES, axes_of
from integration_tests.programs.checking import check
from integration_tests.programs.processes import check_in_processes
from integration_tests.programs.running import NothingToReduceError
from integration_tests.programs.saving import PROCESSES, Case, NothingToSaveError, check_saving
from integration_tests.programs.strategies import cases, savings

TRIED: Counter[str] = Counter()
"""How many cases on each axis have been the same."""
UNDER_WAY: Path | None = None
"""The file that has the case under way, for one that ends the process, if there is such a file."""


def settings(examples: int, **arguments: Any) -> hypothesis.settings:
    """As many examples; a failure is shrunk, and printed with what repeats it."""
    return hypothesis.settings(
        max_examples=examples,
        derandomize=False,
        print_blob=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **arguments,
    )


def holds(property_: Callable[..., None], case: Sequence[Any]) -> None:
    """The property, for hypothesis; a case that fails is printed at once, since to shrink it takes minutes."""
    parts = "".join(f"    {part!r},\n" for part in case)
    if UNDER_WAY is not None:
        UNDER_WAY.write_text(parts, encoding="utf-8")
    try:
        property_(*case)
        TRIED.update(axes_of(case))
    except Exception as error:
        if {type(error), type(error.__cause__)} & {NothingToReduceError, NothingToSaveError}:
            hypothesis.reject()
        sys.stdout.write(f"{type(error).__name__}: {error}\n{parts}")
        sys.stdout.flush()
        raise


def search(examples: int, seed: int | None = None, **space: Any) -> None:
    """Try so many cases of a part of the space, the arguments of `strategies.cases`.

    Raises:
        AssertionError, RankError: that of the smallest case that fails; its notes hold the case as code.
    """
    _search(check, cases(**space), examples, seed)


def search_savings(examples: int, seed: int | None = None, **space: Any) -> None:
    """The same for programs that are saved and loaded; the arguments are those of `strategies.savings`."""
    _search(check_saving, savings(**space), examples, seed)


def search_in_processes(examples: int, seed: int | None = None, **space: Any) -> None:
    """The same for what needs process groups. A failure is not shrunk: each case would need a world of its own."""
    check_in_processes(draw_savings(examples, seed, ways=PROCESSES, **space))


def draw_savings(examples: int, seed: int | None = None, **space: Any) -> list[Case]:
    """So many cases."""
    cases: list[Case] = []
    _search(lambda *case: cases.append(case), savings(**space), examples, seed)
    return cases


def _search(property_: Callable[..., None], space: Any, examples: int, seed: int | None) -> None:
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    sys.stdout.write(f"hypothesis's seed: {seed}\n")

    def of_the_space(case: Sequence[Any]) -> None:
        holds(property_, case)

    run: Callable[[], None] = hypothesis.given(space)(of_the_space)
    hypothesis.seed(seed)(settings(examples)(run))()


SEARCHES = {
    "training": (search, 500),
    "saving": (search_savings, 500),
    "processes": (search_in_processes, 60),
}
"""What is searched, and how many cases at a time."""


def main() -> None:
    """Search over all of the space."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", type=int, default=2000, help="how many cases (default: 2000)")
    parser.add_argument("--minutes", type=float, help="go on for this long instead")
    parser.add_argument("--of", choices=tuple(SEARCHES), default="training", help="what (default: training)")
    parser.add_argument("--seed", type=int, help="of the first cases, which are 500 or fewer")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    be_patient()
    global UNDER_WAY
    UNDER_WAY = Path(tempfile.mkdtemp()) / "case.txt"
    faulthandler.enable()
    sys.stdout.write(f"if the process crashes, the case is in {UNDER_WAY}\n")
    begun, done, seed = time.monotonic(), 0, asked.seed
    run, most = SEARCHES[asked.of]
    while time.monotonic() - begun < 60 * asked.minutes if asked.minutes else done < asked.examples:
        count = most if asked.minutes else min(most, asked.examples - done)
        run(count, seed)
        seed, done = None, done + count
        sys.stdout.write(f"{done} cases in {time.monotonic() - begun:.0f} s, all the same\n")
        sys.stdout.flush()
    sys.stdout.write("".join(f"{TRIED[name]:8d} with {name}\n" for name in AXES))


if __name__ == "__main__":
    main()
