"""Predict the time of a step on this machine, and measure it: two ranks, shared memory and gloo.

`python tools/plans times` writes the tables to docs/plans.md. Each block as a unit is measured beside what the planner
chooses, one step of each in turn, so that both meet the same noise.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Manager
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from flatparam.planning.fitting.search import fit
from flatparam.planning.hardware.named import profile_named
from flatparam.planning.making import plan_of
from flatparam.planning.program import Trained, TrainingProgram, train
from flatparam.planning.setup import Setup
from flatparam.planning.units import NamedUnits
from flatparam_comm import resolve_topology
from plans.transformers import Decoder, LlamaBlock, Sizes

ROUNDS: Final = 20
WARM: Final = 3
PLENTY: Final = 10**12


class Wide(nn.Module):
    """A block of two wide products."""

    def __init__(self, width: int) -> None:
        """Make the block."""
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, length, width]` to the same shape."""
        made: Tensor = x + self.down(torch.relu(self.up(x)))
        return made


class WideModel(nn.Module):
    """Few wide blocks between an embedding and a head."""

    def __init__(self, width: int = 1024, depth: int = 4) -> None:
        """Make the model."""
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Wide(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for each token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(x)
        return made


def decoder(**sizes: int) -> nn.Module:
    """A Llama-like decoder."""
    return Decoder(Sizes(**sizes), LlamaBlock)


MODELS: Final[dict[str, tuple[Callable[[], nn.Module], str, int, int]]] = {
    "small": (functools.partial(decoder, layers=4, width=64), "LlamaBlock", 4, 32),
    "wide": (WideModel, "Wide", 2, 64),
    "Llama-like": (
        functools.partial(decoder, layers=6, width=256, heads=8, kv_heads=4, hidden=704, vocabulary=4096),
        "LlamaBlock",
        2,
        128,
    ),
}
"""A model, the class of its blocks, and the rows and tokens of a batch."""


@define
class Clock:
    """A watcher that hands control back before each step, and keeps the time of each."""

    seconds: list[float] = field(factory=list)
    trained: Trained | None = None

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """See `Watcher.stage`."""
        yield

    def made(self, trained: Trained) -> None:
        """See `Watcher.made`."""
        self.trained = trained


def program_of(name: str) -> TrainingProgram:
    """The program that trains a model of the table."""
    build, _, batch, sequence = MODELS[name]
    return TrainingProgram.of(build, batch=batch, sequence=sequence)


def setup_of(name: str, transport: str) -> Setup:
    """Two ranks, each block a unit."""
    return Setup(world_size=2, wrap=(MODELS[name][1],), transport=transport)


def predicted(transport: str) -> tuple[dict[str, float], dict[str, Setup]]:
    """The seconds of a step by model and way, and the setup that does it."""
    profile = profile_named(f"this-machine:{transport}")
    seconds, setups = {}, {}
    for name in MODELS:
        plain = setup_of(name, transport)
        best = fit(program_of(name), plain, memory=PLENTY, profile=profile, only_units=True).best
        for way, plan in (
            ("each block", plan_of(program_of(name), plain, profile=profile)),
            ("planned", best),
        ):
            assert plan.prediction is not None, "a profile was given"
            seconds[f"{name}, {way}"] = plan.prediction.seconds
            setups[f"{name}, {way}"] = plan.setup
    return seconds, setups


def rank(number: int, store: str, transport: str, setups: dict[str, Any], found: Any) -> None:
    """Train every model in every way, a step of each in turn."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    topology = resolve_topology("shared_memory" if transport == "shared_memory" else None)
    steps = {}
    for name, (kept, settings) in setups.items():
        wrap = settings["wrap"] if kept is None else NamedUnits(*kept)
        setup = Setup(**{**settings, "wrap": wrap})
        torch.manual_seed(0)
        program = program_of(name.partition(",")[0])
        trained = train(program, setup, topology, Clock(), steps=0)
        steps[name] = functools.partial(step, program, trained)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM + ROUNDS):
        for name, run in steps.items():
            topology.shard.barrier()
            start = time.perf_counter()
            run()
            if turn >= WARM:
                times[name].append(time.perf_counter() - start)
    topology.shard.barrier()
    if number == 0:
        found.update(times)
    torch.distributed.destroy_process_group()


def step(program: TrainingProgram, trained: Trained) -> None:
    """One step."""
    program.call(trained.model, trained.inputs).backward()  # type: ignore[no-untyped-call]
    if trained.optimizer is not None:
        trained.optimizer.step()
    trained.model.zero_grad(set_to_none=True)


def measured(transport: str, setups: dict[str, Setup]) -> dict[str, list[float]]:
    """The seconds of the steps of each way, on the first of two ranks."""
    said = {}
    for name, setup in setups.items():
        settings = {"world_size": 2, "transport": transport, "wrap": setup.wrap}
        kept = None
        if isinstance(setup.wrap, NamedUnits):
            kept, settings["wrap"] = (dict(setup.wrap.frees), setup.wrap.forward_prefetch), None
        said[name] = (kept, settings)
    with tempfile.TemporaryDirectory() as folder, Manager() as manager:
        found = manager.dict()
        spawn(rank, (str(Path(folder) / "store"), transport, said, found), nprocs=2)  # type: ignore[no-untyped-call]
        return dict(found)


def rows() -> list[list[str]]:
    """The rows of the table."""
    torch.set_num_threads(1)
    made = []
    for transport in ("shared_memory", "gloo"):
        seconds, setups = predicted(transport)
        times = measured(transport, setups)
        for name, each in times.items():
            median = statistics.median(each)
            low, _, high = statistics.quantiles(each, n=4)
            made.append(
                [
                    name,
                    transport.replace("_", " "),
                    f"{seconds[name] * 1e3:.1f}",
                    f"{median * 1e3:.1f}",
                    f"{low * 1e3:.1f} to {high * 1e3:.1f}",
                    f"{(seconds[name] / median - 1) * 100:+.0f} %",
                ]
            )
            sys.stdout.write(" | ".join(made[-1]) + "\n")
    return made
