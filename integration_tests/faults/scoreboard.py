"""The table of faults: every fault on one of two ranks, over gloo and through shared memory, beside torch's FSDP1.

    python -m integration_tests.faults.scoreboard [--faults KILLED ...] [--json FILE]

Exit code 1 says that flatparam did worse than it promises: a rank that waited for the timeout, died, heard nothing, or
raised an error that names nobody.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from integration_tests.faults.program import DIVERGENCES, FAILURES
from integration_tests.faults.trial import LIBRARIES, LIMIT, Outcome, run_trial
from tools.pages import table

__all__ = ["main"]

_FINE = ("named",)


def main(arguments: list[str] | None = None) -> int:
    """Run the trials, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = [*FAILURES, *DIVERGENCES]
    parser.add_argument("--faults", nargs="+", choices=everything, default=everything)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--json", type=Path, help="a file for everything that the ranks said")
    chosen = parser.parse_args(arguments)
    outcomes: dict[tuple[str, str, bool], Outcome] = {}
    for fault in chosen.faults:
        for library in chosen.libraries:
            for use_orig_params in (False, True):
                outcomes[fault, library, use_orig_params] = run_trial(library, fault, use_orig_params)
        print(*_row(fault, chosen.libraries, outcomes), sep=" | ", file=sys.stderr, flush=True)
    print(_table(chosen.faults, chosen.libraries, outcomes))
    if chosen.json is not None:
        told = [
            {"fault": fault, "library": library, "use_orig_params": original, **_facts(outcome)}
            for (fault, library, original), outcome in outcomes.items()
        ]
        chosen.json.write_text(json.dumps(told, indent=1))
    ours = [outcome for (_, library, _), outcome in outcomes.items() if library != "torch FSDP1"]
    return int(any(outcome.verdict not in _FINE for outcome in ours))


def _facts(outcome: Outcome) -> dict[str, object]:
    return {"verdict": outcome.verdict, "seconds": round(outcome.seconds, 2), "told": outcome.told}


def _table(faults: list[str], libraries: list[str], outcomes: dict[tuple[str, str, bool], Outcome]) -> str:
    seconds = ("seconds until all knew: median, most", *(_seconds(each, outcomes) for each in libraries))
    rows = (_row(fault, libraries, outcomes) for fault in faults)
    return table([("fault on rank 1 of 2", *libraries), *rows, seconds], ["---"])


def _row(fault: str, libraries: list[str], outcomes: dict[tuple[str, str, bool], Outcome]) -> list[str]:
    cells = [fault]
    for library in libraries:
        verdicts = [outcomes[fault, library, original].verdict for original in (False, True)]
        cells.append(verdicts[0] if len(set(verdicts)) == 1 else f"{verdicts[0]} (flat), {verdicts[1]} (originals)")
    return cells


def _seconds(library: str, outcomes: dict[tuple[str, str, bool], Outcome]) -> str:
    found = [outcome.seconds for (_, each, _), outcome in outcomes.items() if each == library]
    most = "the timeout" if max(found) >= LIMIT else f"{max(found):.1f}"
    return f"{statistics.median(found):.2f}, {most}"


if __name__ == "__main__":
    sys.exit(main())
