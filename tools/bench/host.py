"""What a unit costs the host, in microseconds: collectives do nothing, and kernels are short beside the calls.

On the CPU it is processor time, which other programs change little; on an accelerator it is the time until the calls
are made, so that waiting for the device is in it.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from flatparam_comm import Collectives

from .absent import CONTENDERS as ABSENT
from .absent import PLAIN, world
from .counts import without_collector
from .instructions import UNITS
from .training import CPU, Setting, Training
from .workloads import stack

PARTS: Final = ("forward", "backward", "update")
RANKS: Final = 8
REFERENCE: Final = "torch FSDP1"
CONTENDERS: Final = {name: build for name, build in ABSENT.items() if "without" not in name}
LEAST_ROUNDS: Final = 5
MOST_ROUNDS: Final = 200
Row = dict[str, Any]


def on_cpu(ranks: Collectives, parameters: int, seconds: float) -> dict[str, Row]:
    """The rows of one of eight ranks on the CPU."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with world(RANKS) as group:
        return costs(group, dist.group.WORLD, parameters, seconds)


def costs(
    group: Collectives,
    process_group: Any,
    parameters: int,
    seconds: float,
    *,
    device: torch.device = CPU,
    units: int = UNITS,
) -> dict[str, Row]:
    """A row for each contender: microseconds of each part of a step, per unit of so many parameters.

    Everybody steps once in each round; a figure is the lower quartile over the rounds.
    """
    setting = Setting(
        stack(units, width=8, depth=parameters // 2), False, group, device=device, process_group=process_group
    )
    clock = time.process_time if device == CPU else time.perf_counter
    rows: dict[str, Row] = {}
    trainings = {}
    for name, build in CONTENDERS.items():
        try:
            trainings[name] = build(setting)
            for _ in range(3):
                trainings[name].step()
        except Exception as error:  # it goes into the results, and the others go on
            trainings.pop(name, None)
            rows[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    samples: dict[str, list[list[float]]] = {name: [] for name in trainings}
    until = time.monotonic() + seconds
    with without_collector():
        for done in range(MOST_ROUNDS):
            if done >= LEAST_ROUNDS and time.monotonic() > until:
                break
            for name, training in trainings.items():
                samples[name].append(_parts(training, clock, device))
    for name, of_rounds in samples.items():
        quartiles = [1e6 / units * statistics.quantiles(part, n=4)[0] for part in zip(*of_rounds, strict=True)]
        rows[name] = dict(zip(PARTS, quartiles, strict=True))
    return {name: rows[name] for name in CONTENDERS}


def lines(rows: Mapping[str, Row]) -> list[list[str]]:
    """Those of a table: microseconds, and what passes take over the plain model's, also as often as the reference's."""
    plain = 0.0 if "error" in rows[PLAIN] else _passes(rows[PLAIN])
    added = {name: _passes(row) - plain for name, row in rows.items() if "error" not in row}
    found = [["µs per unit and step", *PARTS, "passes, over plain", f"x {REFERENCE}"]]
    for name, row in rows.items():
        if "error" in row:
            found.append([name, f"failed: {row['error']}".replace("|", "\\|"), *[""] * 4])
            continue
        compared = added[name] / added[REFERENCE] if name != PLAIN and REFERENCE in added else None
        figures = [*(row[part] for part in PARTS), added[name]]
        ratio = "" if compared is None else f"{compared:.2f}"
        found.append([name, *(f"{figure:.0f}" for figure in figures), ratio])
    return found


def _passes(row: Row) -> float:
    return float(row["forward"] + row["backward"])


def _parts(training: Training, clock: Callable[[], float], device: torch.device) -> list[float]:
    """Seconds of each part."""
    if device != CPU:
        torch.accelerator.synchronize(device)
    begin = clock()
    loss = training.forward()
    forwarded = clock()
    training.backward(loss)
    backwarded = clock()
    training.update()
    return [forwarded - begin, backwarded - forwarded, clock() - backwarded]
