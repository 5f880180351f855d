"""What holds under load, as a table: `nox -s run -- load`, or `python -m integration_tests.load --rows L1 L4`."""

from __future__ import annotations

import argparse
import sys
import time

from integration_tests.load.faults import soak_with_faults
from integration_tests.load.rows import ROWS
from tools.pages import table


def main() -> int:
    """Run the rows, one after the other, and print the table."""
    rows = {**ROWS, "L6": soak_with_faults}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(rows), default=list(rows))
    failed = False
    lines = [["row", "what", "figure"]]
    for name in parser.parse_args().rows:
        began = time.perf_counter()
        try:
            figures = rows[name]()
        except AssertionError as error:
            failed, figures = True, {"failed": str(error)}
        figures["took"] = f"{time.perf_counter() - began:.0f} s"
        lines += [[name, what, f"{figure}"] for what, figure in figures.items()]
        print(*map(" | ".join, lines[-len(figures) :]), sep="\n", file=sys.stderr, flush=True)
    print(table(lines, ["---"]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
