"""A job in which a rank fails every few seconds, and that is started again each time."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from flatparam import Checkpointer
from flatparam_comm import Collectives, RankDied, RankError, shared_memory
from flatparam_comm.testing import run_processes
from integration_tests.load.job import batches, ddp, sharded, train

__all__ = ["FAULTS", "soak_with_faults"]

SAVED_EVERY: Final = 10
LIMIT: Final = 60.0
"""Seconds: the time limit of the process group, which no rank should have to wait for."""


class Bug(Exception):
    """An exception of the user's program."""


def _raise(*args: Any) -> None:
    raise Bug("a bug of the user's")


def _in_forward(model: nn.Module) -> None:
    next(each for each in model.modules() if isinstance(each, nn.LayerNorm)).register_forward_hook(_raise)


def _in_backward(model: nn.Module) -> None:
    norm = next(each for each in model.modules() if isinstance(each, nn.LayerNorm))
    norm.register_forward_hook(lambda module, args, output: output.register_hook(_raise) and None)


def _skips_a_unit(model: nn.Module) -> None:
    blocks = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    blocks[0] = nn.Identity()
    blocks[0].forward = lambda x, turns: x


FAULTS: Final[dict[str, Callable[[nn.Module], object]]] = {
    "killed": lambda model: os.kill(os.getpid(), signal.SIGKILL),
    "terminated": lambda model: os.kill(os.getpid(), signal.SIGTERM),
    "raises in forward": _in_forward,
    "raises in backward": _in_backward,
    "raises between passes": _raise,
    "ends its program": lambda model: os._exit(0),
    "a unit is left out": _skips_a_unit,
    "a state dict": lambda model: model.state_dict(),
    "a forward pass more": lambda model: model(torch.zeros(1, 4, dtype=torch.long)).sum(),
}


def _work(world: Collectives, directory: str, fault: str, culprit: int, delay: float, steps: int, shared: bool) -> None:
    group = shared_memory(world) if shared else world
    model = sharded(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    began = time.time()
    told = Path(directory, f"rank-{world.rank}.json")
    losses = Path(directory, f"losses-{world.rank}.txt")
    happened = False
    try:
        with Checkpointer(Path(directory, "run"), model, optimizer, keep=2) as checkpointer:
            first = 0
            if checkpointer.latest() is not None:
                first = checkpointer.load().step + 1
            with losses.open("a") as file:
                for step, rows in batches(world.rank, world.size, first):
                    if step >= steps:
                        return
                    if world.rank == culprit and not happened and time.time() - began > delay:
                        happened = True
                        Path(directory, "when").write_text(repr(time.time()))
                        FAULTS[fault](model)
                    loss = model(rows[:, :-1], rows[:, 1:])
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    file.write(f"{step} {loss.item().hex()}\n")
                    file.flush()
                    if step % SAVED_EVERY == SAVED_EVERY - 1:
                        checkpointer.save(step)
    except BaseException as error:
        told.write_text(json.dumps({"when": time.time(), "kind": type(error).__name__, "text": str(error)}))
        raise


def _reference(world: Collectives, steps: int) -> list[float]:
    return train(world, ddp, steps)


def soak_with_faults(minutes: float = 10.0, every: float = 10.0) -> dict[str, str]:
    """A random rank fails in a random way every few seconds; the job is restarted from its latest checkpoint.

    Each rank that is not at fault has to hear who failed; no step may have another loss than in an undisturbed job.
    """
    choose = random.Random(1)
    ends = time.monotonic() + 60 * minutes
    cycles = lost = silent = unnamed = 0
    latest_news = 0.0
    seen: dict[tuple[int, int], str] = {}
    with tempfile.TemporaryDirectory() as directory:
        while time.monotonic() < ends:
            fault, culprit = choose.choice(list(FAULTS)), choose.randrange(2)
            for path in Path(directory).glob("rank-*.json"):
                path.unlink()
            when = Path(directory, "when")
            when.unlink(missing_ok=True)
            delay = choose.uniform(0.0, every)
            try:
                run_processes(
                    2,
                    _work,
                    directory,
                    fault,
                    culprit,
                    delay,
                    10**9,
                    choose.random() < 0.5,
                    timeout=LIMIT + 2 * every,
                    pg_timeout=LIMIT,
                )
                silent += 1
            except (RankDied, RankError):
                pass
            cycles += 1
            told = Path(directory, f"rank-{1 - culprit}.json")
            if not told.exists() or not when.exists():
                silent += 1
                continue
            news = json.loads(told.read_text())
            latest_news = max(latest_news, news["when"] - float(when.read_text()))
            named = news["kind"] in ("PeerError", "MismatchError", "DivergenceError")
            if not named or f"rank {culprit}" not in news["text"]:
                unnamed += 1
                print(f"{fault} on rank {culprit}: {news}")
            lost += _compare(directory, seen)
        steps = max(step for _, step in seen) + 1
        compared = min(steps, 2000)
        expected = run_processes(2, _reference, compared, timeout=3600, pg_timeout=LIMIT)
    for rank, losses in enumerate(expected):
        for step, loss in enumerate(losses):
            assert seen[rank, step] == loss.hex(), f"step {step} has another loss than without faults"
    assert silent == 0, f"{silent} faults were not noticed"
    assert unnamed == 0, f"{unnamed} errors do not name the rank"
    return {
        "cycles": f"{cycles}, in {minutes:g} minutes",
        "detected and named": f"{cycles - silent - unnamed} of {cycles}",
        "silent": f"{silent}",
        "longest time until the other rank knew": f"{latest_news:.1f} s",
        "steps": f"{steps:,}, the first {compared:,} with DDP's bits; {lost:,} were lost and trained again",
    }


def _compare(directory: str, seen: dict[tuple[int, int], str]) -> int:
    """Take the losses of the last cycle; returns how many of its steps had been trained before."""
    again = 0
    for rank in range(2):
        file = Path(directory, f"losses-{rank}.txt")
        for line in file.read_text().splitlines() if file.exists() else ():
            step, loss = line.split()
            key = (rank, int(step))
            again += rank == 0 and key in seen
            assert seen.setdefault(key, loss) == loss, f"step {step} has another loss when it is trained again"
        file.unlink(missing_ok=True)
    return again
