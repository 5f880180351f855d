"""Instructions of a step, counted by callgrind: the same in every run to a fraction of a percent.

`measure` starts itself under valgrind, once for a world size. There each contender is built and makes two steps; what
the third executes, and another construction, is written to a file of its own, for each part.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from flatparam_comm import Collectives

from .absent import CONTENDERS, PLAIN, world
from .training import Setting, Training
from .workloads import stack

T = TypeVar("T")
UNITS: Final = 16
PATIENCE: Final = 1800
PARTS: Final = ("build", "pass", "update")
TOOLS: Final = Path(__file__).resolve().parents[1]


def measure(world_size: int, parameters: Sequence[int], names: Sequence[str] = tuple(CONTENDERS)) -> dict[str, Any]:
    """Instructions per unit more than the plain model's: by contender and parameters in a unit, for each part.

    `build` is construction, `pass` a forward and a backward pass, `update` the optimizer's step.
    """
    names = [PLAIN, *(name for name in names if name != PLAIN)]
    counts = iter(executed("bench.instructions", [world_size, list(parameters), names]))
    found = {n: {p: {part: next(counts) for part in PARTS} for p in parameters} for n in names}
    return {
        name: {
            str(p): {part: (n - found[PLAIN][p][part]) / UNITS for part, n in parts.items()} for p, parts in by.items()
        }
        for name, by in found.items()
        if name != PLAIN
    }


def executed(module: str, plan: Any) -> list[int]:
    """Run `module` under callgrind with `plan` as JSON; return what each of its calls of `counted` has executed."""
    with tempfile.TemporaryDirectory() as directory:
        valgrind = ["valgrind", "--tool=callgrind", "--collect-atstart=no", "--instr-atstart=no", "-q"]
        valgrind.append(f"--callgrind-out-file={directory}/out")
        command = [*valgrind, sys.executable, "-W", "ignore", "-m", module, json.dumps(plan)]
        path = os.pathsep.join([str(TOOLS), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise RuntimeError(f"callgrind of {plan} failed:\n{done.stderr[-4000:]}")
        return _counts(Path(directory))[1:]


def _counts(directory: Path) -> list[int]:
    """The totals of the dumps, in the order in which they were made."""
    dumps = sorted(directory.glob("out.*"), key=lambda path: int(path.suffix[1:]))
    totals = (re.search(r"^(?:totals|summary): (\d+)", dump.read_text(), re.MULTILINE) for dump in dumps)
    return [int(total[1]) for total in totals if total]


def begin_to_count() -> None:
    """Have callgrind look from here on; until then the program is several times faster."""
    subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, capture_output=True)
    counted(lambda: None)  # the first count after this is nonsense


def counted(action: Callable[[], T]) -> T:
    """Return what `action` returns, and have callgrind write down what it executes."""
    gc.collect()
    gc.disable()  # when it runs depends on what ran before
    torch._C._valgrind_toggle()
    result = action()
    torch._C._valgrind_toggle_and_dump_stats()
    gc.enable()
    return result


def _under_valgrind(world_size: int, parameters: Sequence[int], names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with world(world_size) as group:
        warmed = []
        for name in names:
            for count in parameters:
                build = partial(CONTENDERS[name], _setting(group, count))
                training = build()
                training.step()
                training.step()
                warmed.append((build, training))
        begin_to_count()
        for build, training in warmed:
            _count_parts(build, training)


def _count_parts(build: Callable[[], Training], training: Training) -> None:
    """Write a dump for each of `PARTS`."""
    counted(build)
    counted(lambda: training.backward(training.forward()))
    counted(training.update)


def _setting(group: Collectives, parameters: int) -> Setting:
    return Setting(stack(UNITS, width=8, depth=parameters // 2), False, group)


if __name__ == "__main__":
    _under_valgrind(*json.loads(sys.argv[1]))
