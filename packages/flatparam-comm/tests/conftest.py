"""The engines that the contract is tested on.

`world` stands for one of them at one size: `world.run(fn)` runs `fn(collectives, device)` on every rank. The same tests
run over all engines, and over decorators that must change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from flatparam_comm import (
    ByteLedger,
    Collectives,
    FaultyCollectives,
    HookedCollectives,
    RecordingCollectives,
    SingleCollectives,
)
from flatparam_comm.testing import PATIENCE, be_patient, run_processes, run_threads
from flatparam_simdev.worlds import process_world as processes

be_patient()

Contract = Callable[..., Any]


@attrs.frozen
class World:
    """One engine at one size."""

    name: str
    size: int
    device: str

    def run(self, fn: Contract, *args: Any) -> list[Any]:
        """Run `fn(collectives, device, *args)` on each rank; returns the results."""
        kind = self.name.split("-")[0]
        if kind == "gloo":
            return run_processes(self.size, fn, self.device, *args)
        if kind == "nccl":
            return [_run_nccl(fn, self.device, *args)]
        # In this process it is torch's default device rather than the CPU.
        device = str(torch.get_default_device()) if self.device == "cpu" else self.device
        if kind == "single":
            return [fn(SingleCollectives(), device, *args)]
        decorate = _DECORATORS.get(kind, lambda collectives: collectives)
        return run_threads(
            self.size,
            lambda collectives: fn(decorate(collectives), device, *args),
            deliver_late=kind != "early",
        )


def _hooked(inner: Collectives) -> Collectives:
    return HookedCollectives(
        inner,
        all_gather=lambda inner, output, shard, label: inner.all_gather(output, shard, label=label),
        reduce_scatter=lambda inner, output, full, label: inner.reduce_scatter(output, full, label=label),
        all_reduce=lambda inner, output, _, label: inner.all_reduce(output, label=label),
    )


_DECORATORS: dict[str, Callable[[Collectives], Collectives]] = {
    "recording": lambda inner: RecordingCollectives(inner, ByteLedger()),
    "faulty": lambda inner: FaultyCollectives(inner, []),
    "hooked": _hooked,
}


def _run_nccl(fn: Contract, *args: Any) -> Any:
    from flatparam_comm import ProcessGroupCollectives

    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return fn(ProcessGroupCollectives(), *args)
    finally:
        torch.distributed.destroy_process_group()


_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine")
_WORLDS = [
    *(pytest.param(World(name, int(name[-1]), "cpu"), id=name) for name in ("single-1",)),
    *(pytest.param(World(f"threads-{size}", size, "cpu"), id=f"threads-{size}") for size in (1, 2, 3, 4)),
    *(
        pytest.param(World(f"{name}-2", 2, "cpu"), id=f"{name}-2")
        for name in ("early", "recording", "faulty", "hooked")
    ),
    *(
        pytest.param(World(f"gloo-{size}", size, "cpu"), id=f"gloo-{size}", marks=pytest.mark.processes)
        for size in (2, 3)
    ),
    *(
        pytest.param(World(name, int(name[-1]), "cuda:0"), id=f"{name}-cuda", marks=[pytest.mark.gpu, _NO_GPU])
        for name in ("single-1", "threads-2", "threads-3", "early-2", "nccl-1")
    ),
]


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    # The bits of some sums depend on the number of threads.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _late_reports_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank has failed, wait for the others' reports: which rank is to blame must not depend on which is slow."""
    monkeypatch.setattr(processes, "_GRACE_SECONDS", PATIENCE)


@pytest.fixture(params=_WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    """Each engine at each size."""
    chosen: World = request.param
    return chosen
