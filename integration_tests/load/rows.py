"""What is asked of a long, a wide, a large and a disturbed job; each function returns its figures, or asserts."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch import nn

from flatparam import Checkpointer, FullStateDictConfig, FullyShardedDataParallel, StateDictType
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, set_relay
from flatparam_comm.testing import run_processes
from flatparam_guard.group_calls import GroupCalls
from integration_tests.load.job import Resources, batches, ddp, resources, sharded, status_nbytes, train

__all__ = ["ROWS", "guards", "many_units", "oversubscribed", "saves", "soak", "wide"]

Figures = dict[str, str]
_LONG: Final = 3600.0
_MIB: Final = 2**20
ITSELF: Final = 160 * _MIB
"""Bytes that a process takes for code that it had not run before."""


def digest(losses: Sequence[float]) -> str:
    """A few digits that tell whether two runs have the same losses, bit for bit."""
    return hashlib.sha256(struct.pack(f"{len(losses)}d", *losses)).hexdigest()[:12]


# A long job


def _soak(world: Collectives, steps: int) -> tuple[list[float], list[Resources]]:
    seen = []

    def note(step: int, loss: float) -> None:
        if step == 0:
            gc.freeze()
        if step % max(1, steps // 50) == 0:
            seen.append(resources())

    return train(world, sharded, steps, note), seen


def _growth(seen: Sequence[int], parts: int = 4) -> float:
    """How much a figure grows from one part of what was seen to the next, at least.

    A leak grows in every part; what caches keep grows in one.
    """
    length = len(seen) // parts
    medians = [statistics.median(seen[part * length : (part + 1) * length]) for part in range(parts)]
    return max(0.0, min(after - before for before, after in itertools.pairwise(medians))) / length


def _reference(world: Collectives, steps: int) -> list[float]:
    return train(world, ddp, steps)


def soak(steps: int = 10_000) -> Figures:
    """Two ranks train for long, to the bits of DDP, and neither memory, files nor threads grow."""
    found = run_processes(2, _soak, steps, timeout=_LONG, pg_timeout=120)
    expected = run_processes(2, _reference, steps, timeout=_LONG, pg_timeout=120)
    slopes = []
    for (losses, seen), reference in zip(found, expected, strict=True):
        assert digest(losses) == digest(reference), "the losses are not DDP's"
        settled = seen[len(seen) // 2 :]
        slopes.append(_growth([each.nbytes for each in settled]) / max(1, steps // 50))
        assert slopes[-1] < 256, f"memory grows by {slopes[-1]:.0f} bytes a step"
        # Each note is an object, too.
        assert _growth([each.objects - number for number, each in enumerate(settled)]) == 0, "objects are left behind"
        assert len({each.files for each in settled}) == 1, "files were opened and not closed"
        assert len({each.threads for each in settled}) == 1, "threads were started and not ended"
    losses = found[0][0]
    return {
        "steps": f"{steps:,}",
        "losses": f"{losses[0]:.3f} to {losses[-1]:.3f}, DDP's bits ({digest(losses)})",
        "memory": f"{max(slopes):.0f} bytes a step",
        "files and threads": "constant",
        "false alarms": "0",
    }


# More ranks than cores


def _short(world: Collectives, steps: int) -> list[float]:
    return train(world, sharded, steps)


def oversubscribed(steps: int = 200) -> Figures:
    """Four and eight ranks on few cores train as two ranks do, but for the order in which sums are rounded."""
    means = {}
    for size in (2, 4, 8):
        losses = run_processes(size, _short, steps, timeout=_LONG, pg_timeout=300)
        means[size] = [statistics.fmean(ranks) for ranks in zip(*losses, strict=True)]
    worst = max(abs(a - b) / b for size in (4, 8) for a, b in zip(means[size], means[2], strict=True))
    assert worst < 1e-3, f"the losses differ by {worst:.1e}"
    return {"ranks": "2, 4, 8", "steps": f"{steps}", "largest relative difference of a loss": f"{worst:.1e}"}


# Many units


class _Nest(nn.Module):
    """A unit in a unit in a unit ..."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = _Nest(depth - 1) if depth > 1 else nn.Identity()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(torch.tanh(self.linear(value)))
        return found


class _Leaf(nn.Module):
    """Five parameters, one of which has fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.scale * 0.01 * self.second(torch.tanh(self.first(value)))


def _many(world: Collectives, units: int, depth: int) -> tuple[float, float, float, float]:
    torch.manual_seed(0)
    began = time.perf_counter()
    module = nn.Sequential(*(_Leaf() for _ in range(units)), _Nest(depth), nn.Linear(4, 1, bias=False))
    model = FullyShardedDataParallel(
        module,
        process_group=world,
        auto_wrap_policy=ModuleWrapPolicy({_Leaf, _Nest}),
        use_orig_params=True,
    )
    made = time.perf_counter() - began
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, seconds = [], []
    for _ in range(3):
        began = time.perf_counter()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    return made, min(seconds), losses[0], losses[-1]


def many_units(units: int = 1000, depth: int = 50) -> Figures:
    """A thousand units with five parameters each, and nested ones; some ranks hold nothing of a parameter."""
    found = run_processes(3, _many, units, depth, timeout=_LONG, pg_timeout=300)
    made, step, first, last = (max(each) for each in zip(*found, strict=True))
    assert last < first, "the model does not learn"
    return {
        "units": f"{units:,}, and {depth} nested",
        "parameters": f"{5 * units + 2 * depth + 1:,}",
        "ranks": "3",
        "wrapped in": f"{made:.1f} s",
        "a step": f"{step:.2f} s",
        "errors": "0",
    }


# A large model


def _wide(world: Collectives, width: int, layers: int) -> tuple[int, int, int, int, int]:
    def give_memory(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=width**-0.5)

    before = status_nbytes("VmRSS")
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model = FullyShardedDataParallel(
        module, process_group=world, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), param_init_fn=give_memory
    )
    wrapped = status_nbytes("VmHWM")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.ones(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = status_nbytes("VmHWM")
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        exported = sum(tensor.nbytes for tensor in model.state_dict().values())
    return before, wrapped - before, trained - before, status_nbytes("VmHWM") - before, exported


def wide(width: int = 4096, layers: int = 16) -> Figures:
    """A gibibyte of parameters: a rank's memory is its part of what stays, and a few units."""
    found = run_processes(2, _wide, width, layers, timeout=_LONG, pg_timeout=300)
    unit = width * width * 4
    resting = 2 * unit * layers // 2  # a rank's part of the parameters and of the gradients
    full = unit * layers
    above = max(trained - resting for _, _, trained, _, _ in found)
    # A full unit and its full gradient, the next unit, and a reduction under way; and what the process takes itself.
    assert above < 4.5 * unit + ITSELF, f"{above / unit:.2f} units above what rests"
    assert found[0][4] == full
    return {
        "parameters": f"{full / _MIB:,.0f} MiB, a unit {unit / _MIB:,.0f} MiB, 2 ranks",
        "peak of wrapping": f"{max(each[1] for each in found) / _MIB:,.0f} MiB",
        "peak of training": f"{max(each[2] for each in found) / _MIB:,.0f} MiB: "
        f"{resting / _MIB:,.0f} MiB that rest, and {above / unit:.2f} units",
        "peak of a full export": f"rank 0 {found[0][3] / _MIB:,.0f} MiB, rank 1 {found[1][3] / _MIB:,.0f} MiB",
    }


# Many saves


def _saves(world: Collectives, directory: str, count: int, asynchronous: bool) -> list[float]:
    model = sharded(world)
    optimizer = torch.optim.AdamW(model.parameters())
    stalls = []
    with Checkpointer(directory, model, optimizer, keep=3, asynchronous=asynchronous) as checkpointer:
        for step, rows in batches(world.rank, world.size):
            if step == count:
                break
            model(rows[:, :-1], rows[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            began = time.perf_counter()
            checkpointer.save(step)
            stalls.append(1000 * (time.perf_counter() - began))
    return stalls


def _told(milliseconds: Sequence[float]) -> str:
    ordered = sorted(milliseconds)
    return f"{ordered[len(ordered) // 2]:.1f}, {ordered[int(0.99 * len(ordered))]:.1f}"


def saves(count: int = 500) -> Figures:
    """Two ranks save each step and keep three; a reader that looks all the time finds each latest one sound."""
    figures: Figures = {"saves": f"{count}, 3 are kept"}
    for name, asynchronous in (("a save", False), ("the stall of a save in the background", True)):
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "integration_tests.load.reader", directory]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
                stalls = run_processes(2, _saves, directory, count, asynchronous, timeout=_LONG, pg_timeout=120)
                said, _ = reader.communicate("")
            assert reader.returncode == 0, said
            figures[f"{name}: p50, p99"] = f"{_told(stalls[0])} ms"
            figures[f"{name}: a reader"] = said.strip()
    return figures


# The cost of the guards


def _timed(world: Collectives, steps: int, guarded: bool, watched: bool) -> tuple[float, float, float]:
    """The median of a step; and if `watched`, the median of the guards' calls in seconds, and how many a step makes."""
    set_relay(guarded)
    inside: list[float] = []
    begin = GroupCalls.begin

    def watch(*arguments: Any) -> None:
        before = time.perf_counter()
        begin(*arguments)
        inside.append(time.perf_counter() - before)

    moments: list[float] = []
    with mock.patch.object(GroupCalls, "begin", watch) if watched else contextlib.nullcontext():
        train(world, sharded, steps, lambda step, loss: moments.append(time.perf_counter()))
    step = statistics.median(after - before for before, after in itertools.pairwise(moments))
    return step, statistics.median(inside or [0.0]), len(inside) / steps


def guards(steps: int = 300, turns: int = 8) -> Figures:
    """A step with the relay and the comparison of positions and without, in turns; and the time that it is inside."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns):
        for guarded in (True, False) if turn % 2 else (False, True):
            found[guarded].append(run_processes(2, _timed, steps, guarded, False, timeout=_LONG)[0][0])
    step, seconds, calls = run_processes(2, _timed, steps, True, True, timeout=_LONG)[0]
    each = [f"{1000 * statistics.median(found[guarded]):.2f}" for guarded in (True, False)]
    spread = [f"{1000 * time:.2f}" for time in (min(found[False]), max(found[False]))]
    return {
        "steps": f"{turns} times {steps} with guards and as many without, in turns",
        "a step, with and without": f"{each[0]} and {each[1]} ms; the turns without are {spread[0]} to {spread[1]} ms",
        "inside the guards": f"{calls:.0f} calls of {1e6 * seconds:.0f} us, {calls * seconds / step:.1%} of a step",
    }


ROWS: Final[dict[str, Any]] = {
    "L1": soak,
    "L2": oversubscribed,
    "L3": many_units,
    "L4": wide,
    "L5": saves,
    "guards": guards,
}
BRIEF: Final[dict[str, Any]] = {
    "L1": functools.partial(soak, 100),
    "L2": functools.partial(oversubscribed, 5),
    "L3": functools.partial(many_units, 20, 5),
    "L4": functools.partial(wide, 512, 4),
    "L5": functools.partial(saves, 8),
    "guards": functools.partial(guards, 5, 1),
}
"""The same in a moment, for the tests."""
