"""Public complaints, each run with torch's library and with ours: `nox -s run -- complaints`.

python -m integration_tests.complaints                       docs/complaints.json and docs/complaints.md, in minutes
python -m integration_tests.complaints pytorch#176076 ties   print the verdicts of these rows and groups
"""

from __future__ import annotations

import sys

import conftest  # noqa: F401  # ranks are forked from a server that has imported torch and us
from integration_tests.complaints.page import write
from integration_tests.complaints.rows import load_all
from integration_tests.complaints.running import run_alone


def main(names: list[str]) -> None:
    """Run the rows that are named, or all, and write the page."""
    chosen = [each for each in load_all().values() if not names or {each.report, each.group} & {*names}]
    if not chosen:
        sys.exit(f"expected reports or groups of integration_tests/complaints, found {', '.join(names)}")
    found = {}
    for row in chosen:
        found[row.report] = {side: run_alone(row.report, side) for side in row.sides}
        for side, verdict in found[row.report].items():
            sys.stdout.write(f"{row.report:<24} {side:<10} {verdict.kind:<8} {verdict.detail}\n")
        sys.stdout.flush()
    if not names:
        write(found)


if __name__ == "__main__":
    main(sys.argv[1:])
