"""What saving and loading cost: flatparam, torch FSDP1 and torch FSDP2, each in the ways that it has.

All contenders save and load the same model on the same two ranks, one after the other in each round, so that a busy
machine is busy for all of them. Figures are medians over the rounds. What was loaded is compared with what was saved,
value by value; the last round's files are then loaded on three ranks.

Files are read from the page cache, where saving has left them. What flatparam and torch's DCP write is on the disk
when they are done (fsync); what `torch.save` writes need not be. Linux only.

    python tools/compare_checkpoints.py [--parameters 100M] [--rounds 3] [--directory DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final

import torch

from flatparam_comm.testing import run_processes

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkpoint_costs.contenders import CONTENDERS, shape_of
from checkpoint_costs.meters import Cost, enter_private_network
from checkpoint_costs.rounds import Findings, load_elsewhere, save_and_load

RANKS: Final = 2
RANKS_AFTER: Final = 3
PATIENCE: Final = 3600
UNITS: Final = {"K": 10**3, "M": 10**6, "G": 10**9}

COLUMNS: Final = (
    ("", "{name}"),
    ("right", "{right}"),
    ("save s", "{save_returned_s:.2f}"),
    ("finished s", "{save_done_s:.2f}"),
    ("fsync s", "{save_fsync_s:.2f}"),
    ("load s", "{load_done_s:.2f}"),
    ("peak of save", "{save_peak}"),
    ("peak of load", "{load_peak}"),
    ("wire, save", "{save_wire}"),
    ("wire, load", "{load_wire}"),
    ("ledger, save / load", "{ledgers}"),
    ("disk", "{disk}"),
    ("read on 3 ranks", "{resume_read}"),
)


def compare(parameters: int, rounds: int, directory: str) -> dict[str, Any]:
    """Everything that is measured, as the JSON has it."""
    is_private = enter_private_network()
    start_server()
    before = run_processes(RANKS, save_and_load, parameters, rounds, directory, timeout=PATIENCE, pg_timeout=600)
    findings, fingerprints = [each for each, _ in before], before[0][1]
    elsewhere = {
        name: fingerprint
        for name, fingerprint in fingerprints.items()
        if CONTENDERS[name].is_for_any_world_size and not any(rank[name].wrong for rank in findings)
    }
    after = run_processes(
        RANKS_AFTER, load_elsewhere, parameters, directory, elsewhere, timeout=PATIENCE, pg_timeout=600
    )
    return {
        "parameters": shape_of(parameters).numel,
        "ranks": RANKS,
        "rounds": rounds,
        "private_network": is_private,
        "torch": torch.__version__,
        "contenders": {
            name: summary([rank[name] for rank in findings])
            | {"resume": resume([rank[name] for rank in after]) if name in elsewhere else None}
            for name in CONTENDERS
        },
    }


def start_server() -> None:
    """Have the ranks forked from a process that has imported everything, so that no figure contains imports.

    What they free of a MiB or more is given back at once, for everyone: else peaks depend on what was freed before.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    modules = [
        "checkpoint_costs.rounds",
        "flatparam_simdev.worlds.child",
        "torch._dynamo",
    ]  # an optimizer wants the last
    multiprocessing.set_forkserver_preload(modules)
    forkserver.ensure_running()


def summary(ranks: Sequence[Findings]) -> dict[str, Any]:
    """One contender's figures: medians over rounds, of the slowest rank, or a list with an entry for each rank."""
    figures: dict[str, Any] = {"right": not wrongs(ranks), "wrong": wrongs(ranks)}
    for verb, costs in (("save", [rank.saves for rank in ranks]), ("load", [rank.loads for rank in ranks])):
        if all(costs):
            for field in ("returned_s", "done_s", "fsync_s", "wire"):
                figures[f"{verb}_{field}"] = max(medians(costs, field))
            for field in ("peak", "ledger"):
                figures[f"{verb}_{field}"] = medians(costs, field)
    figures["disk"] = ranks[0].disk
    figures["nbytes_read"] = [rank.nbytes_read for rank in ranks]
    return figures


def resume(ranks: Sequence[Findings]) -> dict[str, Any]:
    """The same of a load on more ranks than saved."""
    return {
        "right": not wrongs(ranks),
        "wrong": wrongs(ranks),
        "read": medians([rank.loads for rank in ranks], "read"),
        "nbytes_read": [rank.nbytes_read for rank in ranks],
    }


def wrongs(ranks: Sequence[Findings]) -> list[str]:
    """What is not right, by whichever rank says so."""
    return [rank.wrong for rank in ranks if rank.wrong]


def medians(ranks: Sequence[Sequence[Cost]], field: str) -> list[Any]:
    """The median over rounds of one field of the costs, for each rank."""
    return [statistics.median(getattr(cost, field) for cost in costs) if costs else None for costs in ranks]


def table(report: dict[str, Any]) -> list[str]:
    """The report as a Markdown table; sizes in MiB, with a figure for each rank where ranks differ."""
    rows = [[title for title, _ in COLUMNS], ["---", *("--:" for _ in COLUMNS[1:])]]
    for name, figures in report["contenders"].items():
        after = figures["resume"] or {"right": None, "read": []}
        cells = Cells(
            {key: sizes(value) if is_size(key) else value for key, value in figures.items()},
            name=name,
            right="yes" if figures["right"] and after["right"] is not False else "**no**",
            ledgers=sizes([sum(figures.get(f"{verb}_ledger", [])) for verb in ("save", "load")])
            if name.startswith("flatparam")
            else "-",
            resume_read=sizes(after["read"]) or "cannot",
        )
        rows.append([cells.fill(cell) for _, cell in COLUMNS])
    return [f"| {' | '.join(row)} |" for row in rows]


class Cells(dict[str, Any]):
    """Values by name; one that was not measured is a dash."""

    def fill(self, cell: str) -> str:
        """The text of a cell."""
        try:
            return cell.format_map(self)
        except KeyError:
            return "-"


def is_size(key: str) -> bool:
    """Whether a figure counts bytes."""
    return key.endswith(("peak", "wire", "disk"))


def sizes(value: Any) -> str:
    """Bytes in MiB, of several ranks one after the other."""
    values = value if isinstance(value, list) else [value]
    return " / ".join("-" if each is None else f"{each / 2**20:.1f}" for each in values)


def number(text: str) -> int:
    """What is meant by 100M."""
    factor = UNITS.get(text[-1:].upper(), 1)
    return int(float(text if factor == 1 else text[:-1]) * factor)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=number, default="100M", help="about how many, as in 100M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="keep the checkpoints here; else they are deleted")
    parser.add_argument("--json", type=Path, help="write all figures to this file, in bytes and seconds")
    options = parser.parse_args()
    kept = options.directory
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() if kept is None else nullcontext(str(kept)) as directory:
        report = compare(options.parameters, options.rounds, directory)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2))
    network = "their own" if report["private_network"] else "the machine's: others' traffic is counted too"
    print(f"{report['parameters']:,} parameters, AdamW, {RANKS} ranks, medians of {report['rounds']}; sizes in MiB")
    state = 8 * report["parameters"] / RANKS
    print(f"loopback interface: {network}; every load makes {sizes(state)} of optimizer state per rank\n")
    print("\n".join(table(report)))
    for name, figures in report["contenders"].items():
        for wrong in figures["wrong"] + (figures["resume"] or {"wrong": []})["wrong"]:
            print(f"\n{name}: {wrong}")


if __name__ == "__main__":
    main()
