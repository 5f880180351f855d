"""Train a small Llama on meshes, by flatparam and by torch's FSDP1 and FSDP2, and say what is right: docs/meshes.md.

    python tools/meshes_page.py             print the table
    python tools/meshes_page.py --write     and put it into docs/meshes.md
    python tools/meshes_page.py --short     only the first rows, and flatparam alone; fails if anything is wrong

Each cell is a run of three steps: loss, every parameter's gradient, the norm of clipping and the weights are compared
with those of one process that has all data.
"""

import argparse
import sys
import warnings
from typing import Any

from pages import ROOT, fill

from flatparam_comm.testing import be_patient
from integration_tests.meshes.engines import OURS, THEIRS, Setting
from integration_tests.meshes.training import run

PAGE = ROOT / "docs" / "meshes.md"

#: What a row is called, the sizes of its mesh, and how it is trained.
ROWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "2 data x 2 tensor": ((2, 2), {}),
    "1 data x 2 tensor": ((1, 2), {}),
    "2 data x 1 tensor": ((2, 1), {}),
    "2 replicate x 1 shard x 2 tensor": ((2, 1, 2), {}),
    "1 replicate x 2 shard x 2 tensor": ((1, 2, 2), {}),
    "2 x 2, two micro-batches": ((2, 2), {"micro_batches": 2}),
    "2 x 2, two micro-batches, the last one synchronises": (
        (2, 2),
        {"micro_batches": 2, "synchronises": False},
    ),
    "2 x 2, bf16, sums in fp32": ((2, 2), {"narrow": True}),
    "2 x 2, norms are plain parameters": ((2, 2), {"sequence": False, "loss_parallel": False}),
    "2 x 2, SGD": ((2, 2), {"optimizer": "SGD"}),
}
SHORT = 2


def told(faults: list[str]) -> str:
    """Return what a cell says: right, or what is wrong first."""
    if not faults:
        return "right"
    words = [fault.partition(": ")[2] for fault in faults]
    if any("Error" in each for each in words):
        first = next(each for each in words if "Error" in each)
        return f"crash: `{first.split(chr(10))[0][:60]}`"
    kinds = [
        kind
        for kind, sign in (
            ("norm", ": norm "),
            ("gradients", ": gradient"),
            ("weights", "weight"),
            ("loss", ": loss "),
        )
        if any(sign in each for each in words)
    ]
    return f"**wrong**: {', '.join(kinds) or words[0]}"


def table(rows: list[str], engines: tuple[str, ...]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| mesh | "
        + " | ".join(engine if engine in THEIRS else f"flatparam: {engine}" for engine in engines)
        + " |",
        "| --- " * (len(engines) + 1) + "|",
    ]
    for row in rows:
        shape, how = ROWS[row]
        cells = [told(run(Setting(engine, shape, **how), catches=True)) for engine in engines]
        lines.append(f"| {row} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> int:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/meshes.md")
    parser.add_argument("--short", action="store_true", help="a few rows of flatparam alone")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    be_patient()
    if chosen.short:
        lines = table(list(ROWS)[:SHORT], OURS)
        return int(any("wrong" in line or "crash" in line for line in lines))
    lines = table(list(ROWS), (*OURS, *THEIRS))
    if chosen.write:
        fill(PAGE, {"table": "\n".join(lines)})
    ours = [cell for line in lines[2:] for cell in line.split(" | ")[1 : len(OURS) + 1]]
    return int(any("right" not in cell for cell in ours))


if __name__ == "__main__":
    sys.exit(main())
