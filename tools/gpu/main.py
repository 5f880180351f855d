"""The command line.

    python tools/gpu                          everything, on the accelerator of this machine, in ten minutes
    python tools/gpu --budget 300             what is worth most, in five
    python tools/gpu --only steps losses     some of it; the other results in the file stay
    python tools/gpu --device cpu --tiny --out build/gpu
                                              that the tool works, without an accelerator

There is a process for each device: of the devices the largest power of two, and at most eight. Each measurement has a
limit of time. What it finds is entered in docs/gpu/<device>.json, and docs/gpu/<device>.md is written from that, before
the next one begins. A measurement that fails writes down why, and the others go on. The exit status is not 0 where the
losses are not those of FSDP1, where gradients are divided wrongly, or where a test fails.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final

from attrs import evolve

from flatparam_comm.testing import run_processes

from . import alignment, backend, capture, compiled, host, losses, memory, others, steps, tests
from .facts import Facts, facts_of
from .measurement import Measurement
from .page import write
from .place import Plan, ranks_for, told
from .results import command_for, enter, keep, made_by

MODULES: Final = (backend, alignment, losses, tests, host, steps, memory, compiled, capture, others)
ORDER: Final = (
    *("backend", "alignment", "losses", "tests", "host", "link", "memory"),
    *("compiled", "capture", "steps", "others"),
)
"""By what a minute of each is worth: the last ones are not begun where the time is over."""
MEASUREMENTS: Final[tuple[Measurement, ...]] = tuple(
    sorted(
        (each for module in MODULES for each in module.MEASUREMENTS),
        key=lambda each: ORDER.index(each.module),
    )
)
RESULTS: Final = Path(__file__).resolve().parents[2] / "docs" / "gpu"
BUDGET: Final = 600.0
"""Seconds for everything. What has no time left is not measured, and says so."""
START: Final = 60.0
"""Seconds that asking a device what it is may take."""
RANKS_ON_CPU: Final = 2
PRELOADED: Final = (
    "torch.distributed.fsdp",
    "flatparam",
    "flatparam_comm.testing",
    "flatparam_simdev.worlds.child",
)
OUT_OF_TIME: Final = "the time that all measurements have together (--budget) was over"


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say, and return the exit status."""
    started = time.monotonic()
    parser = _parser()
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # also of the ranks
    os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")  # bits of the CPU's products depend on values alone
    plan = Plan(
        options.device,
        options.ranks or 1,
        tiny=options.tiny,
        seconds=0.1 if options.tiny else options.seconds,
        patience=options.patience,
        imports=tuple(options.imports),
        out=str(options.out),
    )
    _start_server()
    (facts,) = run_processes(1, facts_of, plan, timeout=START * plan.patience)
    if facts is None:
        parser.error("torch finds no accelerator on this machine; --device cpu --tiny shows that the tool works")
    on_cpu = facts.kind == "cpu"
    if not on_cpu and plan.ranks > facts.count:
        parser.error(f"--ranks {plan.ranks}: each rank needs a device of its own, and there are {facts.count}")
    ranks = options.ranks or (RANKS_ON_CPU if on_cpu else ranks_for(facts.count))
    plan = evolve(plan, kind=facts.kind, ranks=ranks)
    options.out.mkdir(parents=True, exist_ok=True)
    file: Path = options.out / f"{facts.slug}.json"
    chosen = [each for each in MEASUREMENTS if not options.only or each.module in options.only]
    return measure_all(chosen, plan, facts, file, started + options.budget * plan.patience)


def _start_server() -> None:
    """Start the process that all ranks are forked from, so that none of them has to import what takes long."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()


def measure_all(chosen: Sequence[Measurement], plan: Plan, facts: Facts, file: Path, until: float = math.inf) -> int:
    """Measure one after the other, enter each in `file` and on its page; returns the exit status."""
    minutes = sum(each.seconds for each in chosen if not each.why_not(plan, facts)) / 60
    about = "" if plan.tiny else f" This takes about {minutes:.0f} minutes."
    print(f"{facts.name} ({facts.count} of them, {facts.backend}): {plan.where}.{about}", flush=True)
    wrong: list[str] = []
    wrote: list[str] = []
    failed: list[str] = []
    keep(file, {each.name for each in MEASUREMENTS})
    for number, measurement in enumerate(chosen, start=1):
        print(f"{number}/{len(chosen)} {measurement.name}: ", end="", flush=True)
        left = (until - time.monotonic()) / plan.patience
        entry = _entry(measurement, plan, facts, left)
        head = {"what": measurement.what, "command": command_for(measurement, plan)}
        enter(file, facts, measurement.name, head | {"made": made_by(plan, facts)} | entry)
        wrote = _written(file, wrong)
        print(_told(entry), flush=True)
        if "error" in entry:
            failed.append(measurement.name)
        if measurement.decides and not entry.get("same", False) and "reason" not in entry:
            wrong.append(measurement.name)
    print("\n".join([f"entered in {file}", *wrote]))
    if failed:
        print(f"{len(failed)} of {len(chosen)} found nothing, for an error: {'; '.join(failed)}")
    for name in dict.fromkeys(wrong):
        print(f"{name}: not as it has to be, or not known")
    return 1 if wrong else 0


def _written(file: Path, wrong: list[str]) -> list[str]:
    """The page is written, or it is said why it cannot be: the figures are there, and the others go on."""
    try:
        return write(file)
    except Exception as error:
        wrong.append("the page")
        return [f"no page: {told(error)}"]


def _entry(measurement: Measurement, plan: Plan, facts: Facts, left: float) -> dict[str, Any]:
    """What was found, or the reason why nothing was looked for, or the error."""
    reason = measurement.why_not(plan, facts)
    if reason or left < measurement.seconds / 2:
        return {"reason": reason or OUT_OF_TIME}
    started = time.monotonic()
    try:
        found = measurement.run(plan, facts, min(measurement.limit, left))
    except Exception as error:  # whatever it is, the others go on
        found = {"error": told(error)}
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def _told(entry: dict[str, Any]) -> str:
    if "reason" in entry:
        return str(entry["reason"])
    if "error" in entry:
        return f"FAILED after {entry['seconds']:.0f} s: {entry['error']}"
    failed = [name for name, row in entry.get("rows", {}).items() if "error" in row]
    without = f", without {'; '.join(failed)}" if failed else ""
    return f"{entry['seconds']:.0f} s{without}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="", help="as torch calls it (default: the accelerator there is)")
    parser.add_argument("--only", nargs="+", choices=ORDER, default=[], help="measure these")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), help="processes (default: see above)")
    parser.add_argument("--tiny", action="store_true", help="models so small that only the tool is tried")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for results (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for the rounds of one table (default: 20)")
    parser.add_argument("--patience", type=float, default=1.0, help="what limits of time are multiplied by")
    parser.add_argument(
        "--import", nargs="+", default=[], dest="imports", metavar="MODULE", help="what registers the device"
    )
    return parser
