"""The hardware profile of this machine, measured within seconds; as a program, this module is a rank."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn

from flatparam.planning.errors import PlanError
from flatparam.planning.hardware.profile import Profile, Way
from flatparam.planning.program import Trained, TrainingProgram, train
from flatparam.planning.rehearsal.rehearsing import rehearse
from flatparam.planning.setup import Setup
from flatparam_comm import Collectives, resolve_topology

__all__ = ["this_machine"]

_SECONDS: Final = 0.2
"""How long each kernel is repeated."""
_WIDTH: Final = 256
"""The rows and columns of the matrices that are multiplied."""
_ADDED: Final = 2**22
"""The elements of the vectors that are added: 16 MB each, which no cache holds."""
_STEPS: Final = 8
_SMALL, _LARGE = 2**14, 2**21
"""The elements of the buffers that two ranks exchange."""
_PATIENCE: Final = 600


@functools.cache
def this_machine(transport: str = "shared_memory") -> Profile:
    """The profile of this machine's processor, as this process may use it, and of two ranks on it.

    Two processes measure at once, since ranks share a machine's memory and cores: products of matrices, sums of
    vectors, collectives, and what the host takes beside its kernels in steps of a small model. Once in a process.

    Args:
        transport: "shared_memory" or "gloo".

    Raises:
        PlanError: if the two processes cannot be started.
    """
    return Profile.of({**_said_by_two_ranks(transport), "name": f"this machine, {transport}"})


def _measured(transport: str, group: Collectives) -> dict[str, Any]:
    """What a profile says of this machine, while the other rank measures, too."""
    way = attrs.asdict(_way(group))
    bandwidth = _bandwidth()
    rough: dict[str, Any] = {
        "name": transport,
        "source": f"measured on {platform.machine()}, two ranks of {torch.get_num_threads()} thread(s), "
        f"torch {torch.__version__}",
        "device": "cpu",
        "flops": {"float32": _flops(torch.float32), "bfloat16": _flops(torch.bfloat16)},
        "memory": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "memory_bandwidth": bandwidth,
        "launch": 0.0,
        "link": way,
        "network": way,
        "host": {"bandwidth": bandwidth},
    }
    group.barrier()
    return {**rough, "launch": _launch(Profile.of(rough))}


def _seconds_of(run: Callable[[], object]) -> float:
    """The median time of a call, in seconds."""
    run()
    found = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _flops(dtype: torch.dtype) -> float:
    a, b = (torch.ones(_WIDTH, _WIDTH, dtype=dtype) for _ in range(2))
    out = torch.empty(_WIDTH, _WIDTH, dtype=dtype)
    return float(2 * _WIDTH**3 / _seconds_of(lambda: torch.mm(a, b, out=out)))


def _bandwidth() -> float:
    a, b = torch.ones(_ADDED), torch.ones(_ADDED)
    # The sum is new memory, as most of what a step computes.
    return 3 * a.nbytes / _seconds_of(lambda: torch.add(a, b))


class _Small(nn.Module):
    """A model whose kernels take no time to speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(6))
        )

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.blocks(self.embedding(tokens))
        return made


@final
@attrs.define
class _Clock:
    """A watcher that takes the time at which each step begins."""

    starts: dict[int, float] = attrs.field(factory=dict)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        if name == "forward":
            self.starts.setdefault(step, time.perf_counter())
        yield

    def made(self, trained: Trained) -> None:
        """Nothing is noted of it."""


def _launch(profile: Profile) -> float:
    """The seconds of the host for each kernel or collective: what steps of a small model take beside their kernels."""
    program = TrainingProgram.of(_Small, batch=1, sequence=4)
    setup = Setup(world_size=2, wrap=("Sequential",))
    found = rehearse(program, setup)
    last = [e for e in found.entries if e.step == found.steps - 1 and e.stage not in ("building", "wrapping")]
    runs = [found.kernels[e.start : e.stop] for e in last if e.kind == "kernels"]
    count = sum(map(len, runs)) + sum(e.kind == "issued" for e in last)
    busy = sum(profile.seconds_of(found.works[number]) for run in runs for number in run)
    clock = _Clock()
    train(program, setup, setup.topology(), clock, steps=_STEPS)
    times = [clock.starts[step + 1] - clock.starts[step] for step in range(2, _STEPS - 1)]
    return max(0.0, statistics.median(times) - busy) / count


def _way(group: Collectives) -> Way:
    """How two processes exchange bytes: from the times of small and of large gathers and reductions."""
    small, large = (_collectives_take(group, numel) for numel in (_SMALL, _LARGE))
    sent = {size: size * 4 // 2 for size in (_SMALL, _LARGE)}
    bandwidth = (sent[_LARGE] - sent[_SMALL]) / max(large - small, 1e-9)
    return Way(bandwidth, max(0.0, small - sent[_SMALL] / bandwidth))


def _said_by_two_ranks(transport: str) -> dict[str, Any]:
    """Start two ranks that measure at once, since they share what the machine has; returns what the first says."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, transport, str(Path(folder) / "store")]
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=_PATIENCE)[0] for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise PlanError(
                f"expected two processes to measure this machine within {_PATIENCE} s, found that they did not; "
                "write a profile by hand"
            ) from error
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(rank.returncode for rank in ranks):
        raise PlanError(
            f"expected two processes that exchange bytes over {transport}, found that they failed; measure another "
            "transport, or write a profile by hand"
        )
    found: dict[str, Any] = json.loads(said[0])
    return found


def _collectives_take(group: Collectives, numel: int) -> float:
    """The mean time of a gather and a reduction of so many elements, in seconds; the median of some."""
    full, shard = torch.zeros(numel), torch.zeros(numel // group.size)
    found = []
    for _ in range(15):
        start = time.perf_counter()
        group.all_gather(full, shard).wait()
        group.reduce_scatter(shard, full).wait()
        found.append((time.perf_counter() - start) / 2)
    return statistics.median(found)


def _be_a_rank(transport: str, store: str, rank: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    try:
        where: Any = "shared_memory" if transport == "shared_memory" else None
        group = resolve_topology(where).shard
        found = _measured(transport, group)
        group.barrier()
    finally:
        torch.distributed.destroy_process_group()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    _be_a_rank(*sys.argv[1:])
