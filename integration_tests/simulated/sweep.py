"""Run every combination of settings, and count findings: ``python -m integration_tests.simulated.sweep --every 7``."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any, Final

import attrs

from flatparam_comm.errors import RankError
from integration_tests.simulated.programs import Outcome, Program, run
from integration_tests.simulated.worlds import on_simulated

AXES: Final[dict[str, tuple[Any, ...]]] = {
    "strategy": ("full", "grad_op", "none", "hybrid", "hybrid_of_one"),
    "offload": (False, True),
    "precision": ("", "bfloat16"),
    "prefetch": ("", "forward", "late"),
    "checkpointing": ("", "reentrant", "not reentrant"),
    "accumulation": ("", "reduced", "not reduced"),
    "clip": (False, True),
    "use_orig_params": (False, True),
}
TOGETHER: Final = 12
"""Programs that share a world."""


def combinations() -> Iterator[Program]:
    """All programs; what else can be chosen goes round with them."""
    for number, values in enumerate(itertools.product(*AXES.values())):
        chosen: dict[str, Any] = dict(zip(AXES, values, strict=True))
        accumulation = chosen.pop("accumulation")
        program = Program(
            micro_batches=2 if accumulation else 1,
            no_sync=accumulation == "not reduced",
            optimizer=("sgd", "adam", "fused adam")[number % 3],
            evaluate=number % 2 == 1,
        )
        yield attrs.evolve(program, **chosen)


def outcomes(programs: list[Program]) -> Iterator[tuple[Program, list[Outcome], str]]:
    """Of each program what the ranks tell, or the error; after one, each runs in a world of its own."""
    try:
        ranks = on_simulated(2, run, programs)
    except RankError as error:
        if len(programs) == 1:
            yield programs[0], [], str(error).splitlines()[0]
            return
        for program in programs:
            yield from outcomes([program])
        return
    for program, *told in zip(programs, *ranks, strict=True):
        yield program, told, ""


def wrong_with(told: list[Outcome], error: str) -> list[str]:
    """What is wrong with a program, in lines."""
    lines = [error] if error else []
    lines += [str(finding) for outcome in told for finding in outcome.findings]
    differences = [difference for outcome in told for difference in outcome.differences.values() if difference != 0]
    if differences:
        lines.append(f"{len(differences)} parameters are not the CPU's, by {max(differences)}")
    return lines


def main() -> None:
    """Run them; the exit code says whether nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every so many-th combination")
    parser.add_argument("--first", type=int, default=0, help="where to begin")
    chosen = parser.parse_args()
    programs = list(combinations())[chosen.first :: chosen.every]
    wrong = 0
    for start in range(0, len(programs), TOGETHER):
        for program, told, error in outcomes(programs[start : start + TOGETHER]):
            lines = wrong_with(told, error)
            wrong += bool(lines)
            for line in [f"{program.name}:", *(f"  {line}" for line in lines[:3])] if lines else []:
                print(line, flush=True)
    print(f"{len(programs)} programs; something is wrong with {wrong}")
    sys.exit(min(wrong, 1))


if __name__ == "__main__":
    main()
