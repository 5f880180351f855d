"""The command line.

    python tools/bench steps          a training step: times, CPU, memory, bytes, counts
    python tools/bench instructions   what a unit costs the host, in instructions (needs valgrind)
    python tools/bench host           the same in microseconds, for docs/host-cost.md
    python tools/bench growth         with more units and parameters: construction and passes
    python tools/bench optimizer      the optimizer's step over many small parameters
    python tools/bench profile        where the time of a step goes, by whose code it is
    python tools/bench page           docs/performance.md from the results

Every measurement is entered in one file (--json, by default docs/performance.json), in place of an earlier one of the
same kind. `--help` after a command lists its options.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from flatparam_comm.testing import run_processes

from .absent import CONTENDERS as ABSENT
from .contenders import CONTENDERS, FLOOR, SHARDED_FLOOR
from .figures import as_text, cells, exact, timings
from .growth import grow, optimizer_steps
from .host import lines, on_cpu
from .instructions import measure as count_instructions
from .page import write
from .profiles import profile as profile_steps
from .rounds import measure
from .workloads import MEASURED, WORKLOADS

RANKS: Final = 2
BASE_WORLD: Final = 8
PARALLEL: Final = 2
RESULTS: Final = Path(__file__).resolve().parents[2] / "docs" / "performance.json"
HOST_RESULTS: Final = RESULTS.with_name("host-cost.json")
PRECISIONS: Final = ("fp32", "bf16")


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say, and return the exit status."""
    options = _parser().parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # also of the ranks
    started = time.monotonic()
    options.command(options)
    print(f"done in {(time.monotonic() - started) / 60:.1f} minutes")
    return 0


def steps(options: argparse.Namespace) -> None:
    """All contenders, workload by workload."""
    names = _present([FLOOR, SHARDED_FLOOR, *(n for n in CONTENDERS if _chosen(n, options.contenders))])
    tables = [(w, p) for w in options.workloads for p in options.precisions]
    print(f"{len(names)} contenders, {len(tables)} tables of about {options.seconds:.0f} s and what counting takes")
    for workload, precision in tables:
        arguments = (workload, precision == "bf16", names, options.seconds)
        patience = {"timeout": 3600 + 10 * options.seconds, "pg_timeout": 300}
        counts, samples = zip(*run_processes(RANKS, measure, *arguments, **patience), strict=True)
        timed, counted = timings(samples), exact(counts)
        rows = {name: timed[name] | counted[name] for name in names}
        title = f"{workload}, {precision}"
        table = {"what": WORKLOADS[workload].what, "load": os.getloadavg()[0], "rows": rows}
        _enter(options.json, "steps", title, table)
        print(f"\n{title}: {table['what']}; {rows[FLOOR]['rounds']} rounds; floor {1e3 * rows[FLOOR]['step']:.1f} ms")
        print(as_text(cells(rows)))


def instructions(options: argparse.Namespace) -> None:
    """Instructions per unit and step over the plain model, by callgrind, and how they grow with the world size."""
    names = [name for name in ABSENT if _chosen(name, options.contenders)]
    sizes = [size for size in options.world_sizes if size != BASE_WORLD]
    runs = [(BASE_WORLD, options.parameters), *((size, [4]) for size in sizes)]
    print(f"{len(runs)} runs under callgrind, {PARALLEL} at a time, of some minutes each")
    with ThreadPoolExecutor(PARALLEL) as pool:
        found = list(pool.map(lambda run: count_instructions(run[0], run[1], names), runs))
    for (size, _), rows in zip(runs, found, strict=True):
        if size == BASE_WORLD:
            _enter(options.json, "instructions", f"world size {size}", {"rows": rows}, keeps_rows=True)
        if sizes:
            of_four = {name: {"4": by["4"]} for name, by in rows.items()}
            _enter(options.json, "world size", str(size), {"rows": of_four}, keeps_rows=True)
        for name, by in rows.items():
            figures = ", ".join(f"{count}: {parts['pass'] / 1e6:.2f} M" for count, parts in by.items())
            print(f"world size {size:5}  {name:34}{figures}")


def host(options: argparse.Namespace) -> None:
    """Microseconds of the host per unit and step, one of eight ranks, by library and parameters in a unit."""
    for parameters in options.parameters:
        seconds = options.seconds / len(options.parameters)
        (rows,) = run_processes(1, on_cpu, parameters, seconds, timeout=600 + 10 * seconds)
        entry = {"rows": rows, "load": os.getloadavg()[0]}
        _enter(options.json, "host", f"{parameters} parameters in a unit", entry)
        print(f"{parameters} parameters in a unit\n{as_text(lines(rows))}")
    if options.json == HOST_RESULTS:
        write(json.loads(options.json.read_text()), HOST_RESULTS.with_suffix(".md"))


def growth(options: argparse.Namespace) -> None:
    """Construction and passes of models with more and more units, and parameters in a unit."""
    tables = {
        "units": ([(units, 4) for units in options.units], 2),
        "parameters in a unit": ([(8, parameters) for parameters in options.parameters], 2),
        "construction": ([(1000, 10)], 3),
    }
    for title, (shapes, repetitions) in tables.items():
        (rows,) = run_processes(1, grow, shapes, repetitions, timeout=1800)
        _enter(options.json, "growth", title, {"rows": rows, "load": os.getloadavg()[0]})
        for shape, by in rows.items():
            for name, found in by.items():
                print(f"{shape:10}{name:34}build {found['build']:8.3f} s, pass {1e3 * found['pass']:9.2f} ms")


def optimizer(options: argparse.Namespace) -> None:
    """AdamW's step over the original parameters of one unit, in two groups."""
    for size in options.world_sizes:
        (rows,) = run_processes(1, optimizer_steps, options.parameters, size, timeout=600)
        ranks = "one rank" if size == 1 else f"one of {size} ranks"
        _enter(options.json, "optimizer", f"{options.parameters} parameters, {ranks}", {"rows": rows})
        for name, found in rows.items():
            times = ", ".join(f"{when} {median:.2f}" for when, (_, median, _) in found.items())
            print(f"{ranks:16}{name:34}ms {times}")


def profile(options: argparse.Namespace) -> None:
    """Where the time of a step goes, by whose code it is, with Python's profiler running."""
    for workload in options.workloads:
        rows, _ = run_processes(RANKS, profile_steps, workload, timeout=900)
        entry = {"what": WORKLOADS[workload].what, "load": os.getloadavg()[0], "rows": rows}
        _enter(options.json, "profile", workload, entry)
        for name, by in rows.items():
            shares = "; ".join(f"{owner} {took:.1f}" for owner, took in by.items())
            print(f"{workload:8}{name:36}{sum(by.values()):8.1f} ms: {shares}")


def page(options: argparse.Namespace) -> None:
    """Write the tables and the pictures of docs/performance.md from the results."""
    results = json.loads(options.json.read_text())
    print("\n".join(write(results, options.page)))


def _present(names: Sequence[str]) -> list[str]:
    for name in names:
        if not CONTENDERS[name].is_here:
            print(f"without {name}: {CONTENDERS[name].missing()}")
    return [name for name in dict.fromkeys(names) if CONTENDERS[name].is_here]


def _chosen(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(pattern.lower() in name.lower() for pattern in patterns)


def _enter(path: Path, section: str, title: str, entry: Any, *, keeps_rows: bool = False) -> None:
    """Put one result into the file, with the machine that it is of; perhaps beside rows that are there already."""
    results = json.loads(path.read_text()) if path.exists() else {}
    if keeps_rows:
        before = results.get(section, {}).get(title, {}).get("rows", {})
        entry["rows"] = {
            **before,
            **{name: {**before.get(name, {}), **row} for name, row in entry["rows"].items()},
        }
    entry["machine"] = {
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    results.setdefault(section, {})[title] = entry
    path.write_text(json.dumps(results, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Any, name: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        made.add_argument("--json", type=Path, default=RESULTS, help="where results are (default: %(default)s)")
        made.set_defaults(command=function)
        return made

    of_steps = command(steps, "steps")
    of_steps.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=MEASURED)
    of_steps.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    of_steps.add_argument("--contenders", nargs="+", default=[], help="parts of names; the floors are always there")
    of_steps.add_argument("--seconds", type=float, default=40, help="for the rounds of one table (default: 40)")
    of_instructions = command(instructions, "instructions")
    of_instructions.add_argument(
        "--contenders", nargs="+", default=[], help="parts of names; the results of the others stay"
    )
    of_instructions.add_argument("--parameters", nargs="+", type=int, default=[4, 32], help="in a unit")
    of_instructions.add_argument("--world-sizes", nargs="*", type=int, default=[8, 64, 512, 4096])
    of_host = command(host, "host")
    of_host.set_defaults(json=HOST_RESULTS)
    of_host.add_argument("--parameters", nargs="+", type=int, default=[4, 16, 32, 128], help="in a unit")
    of_host.add_argument("--seconds", type=float, default=80, help="for the rounds (default: 80)")
    of_growth = command(growth, "growth")
    of_growth.add_argument("--units", nargs="+", type=int, default=[8, 30, 100, 300, 1000])
    of_growth.add_argument("--parameters", nargs="+", type=int, default=[4, 30, 100, 300, 1000])
    of_optimizer = command(optimizer, "optimizer")
    of_optimizer.add_argument("--parameters", type=int, default=600)
    of_optimizer.add_argument("--world-sizes", nargs="+", type=int, default=[1, 2])
    of_profile = command(profile, "profile")
    of_profile.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=MEASURED)
    of_page = command(page, "page")
    of_page.add_argument("--page", type=Path, default=RESULTS.with_suffix(".md"), help="(default: %(default)s)")
    return parser
