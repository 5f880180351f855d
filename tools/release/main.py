"""Release one package: its changelog, its version, the ranges of its neighbours, a commit and a tag.

    nox -s release -- core 0.2.0              release flatparam-core 0.2.0
    nox -s release -- core 0.2.0 --dry-run    print what that would change, and change nothing
    nox -s release -- address https://...     write the address of the repository wherever it is named

What stands under [Unreleased] in the package's CHANGELOG.md becomes the section of the version, with today's date. The
version is written to the one file of the package that has it. Packages that depend on this one get a wider
range if theirs ends before the version; raise the lower end by hand when they need something new. One commit holds all
of it, and the tag is PACKAGE-vVERSION. Nothing is pushed or uploaded: the last lines say how.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .address import write_address
from .packages import ReleaseError
from .plan import carry_out, plan_release

__all__ = ["main"]

ROOT: Final = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Release as the arguments say, or refuse to; return the exit status: 1 if the release is refused."""
    parser = argparse.ArgumentParser(
        prog="nox -s release --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", help="core, comm, an add-on such as plan, ..., or the word address")
    parser.add_argument("version", help="as in 0.2.0; or the address")
    parser.add_argument("--dry-run", action="store_true", help="print what would change, and change nothing")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.package == "address":
            changed = write_address(root, chosen.version)
            print("\n".join([f"Wrote the address to {len(changed)} files:", *(f"  {path}" for path in changed)]))
            return 0
        plan = plan_release(root, chosen.package, chosen.version, time.strftime("%Y-%m-%d"))
        print("\n".join(plan.diff()))
        if chosen.dry_run:
            print(f"\nWould commit this as `{plan.message}` and tag the commit {plan.tag}. Nothing was changed.")
            return 0
        carry_out(plan)
    except ReleaseError as error:
        print(f"No release: {error}", file=sys.stderr)
        return 1
    print(f"\nCommitted as `{plan.message}`, and tagged {plan.tag}. To publish it:")
    print(f"  git push origin HEAD {plan.tag}")
    print(f"  nox -s release && python -m twine upload dist/{plan.name.replace('-', '_')}-{plan.version}*")
    return 0
