"""Predict the time of a step on this machine, and measure it: two ranks, shared memory and gloo.

`python tools/plans times` writes the tables to docs/plans.md; `python tools/plans choice` prints only whether what the
planner chooses is faster than each block as a unit. A prediction is from steps of a sample, the program with three
blocks of those that repeat. Steps of samples, of whole programs, and of what the planner chooses are run in turn, so
that all meet the same noise.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Manager
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from flatparam_comm import Topology, resolve_topology
from flatparam_plan.fitting.fit import fit
from flatparam_plan.hardware.samples import ROUGH, Sample
from flatparam_plan.named_units import NamedUnits
from flatparam_plan.rehearsal import rehearse
from flatparam_plan.timeline import predict
from flatparam_plan.training import Setup, Trained, TrainingProgram, train, train_step
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
TURNS: Final = {"small": 10}
"""How many steps in a row a model has in each round, if not one: the shorter a step, the more a single one differs."""


def program_of(name: str) -> TrainingProgram:
    """The program that trains a model of the table."""
    build, _, batch, sequence = MODELS[name]
    return TrainingProgram.of(build, batch=batch, sequence=sequence)


def setup_of(name: str, transport: str) -> Setup:
    """Two ranks, each block a unit."""
    return Setup(world_size=2, wrap=(MODELS[name][1],), transport=transport)


def chosen(transport: str) -> dict[str, Setup]:
    """The setups of each model: each block as a unit, and what the planner chooses with plenty of memory."""
    setups = {}
    for name in MODELS:
        plain = setup_of(name, transport)
        profile = f"this-machine:{transport}"
        best = fit(program_of(name), plain, memory=PLENTY, profile=profile, only_units=True).best
        setups[f"{name}, each block"], setups[f"{name}, planned"] = plain, best.setup
    return setups


@define
class Nothing:
    """A watcher that notes nothing."""

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """See `Watcher.stage`."""
        yield

    def made(self, trained: Trained) -> None:
        """See `Watcher.made`."""


@define
class Way:
    """A program under a setup: its steps, and its sample's."""

    program: TrainingProgram
    setup: Setup
    trained: Trained
    sample: Sample
    seconds: list[float] = field(factory=list)

    def turn(self, topology: Topology, *, sample_first: bool, is_timed: bool) -> None:
        """One step of the sample and one of the program; the first has a cold cache if a different model was before."""
        steps = [self._step_of_sample, self._step_of_program]
        for step in steps if sample_first else reversed(steps):
            topology.shard.barrier()
            step(is_timed=is_timed)

    def _step_of_sample(self, *, is_timed: bool) -> None:
        self.sample.step(is_timed=is_timed)

    def _step_of_program(self, *, is_timed: bool) -> None:
        start = time.perf_counter()
        train_step(self.program, self.setup, self.trained, Nothing(), 0)
        if is_timed:
            self.seconds.append(time.perf_counter() - start)


def rank(number: int, store: str, transport: str, setups: dict[str, Any], found: Any) -> None:
    """Train every model in every way, a step of each in turn."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    topology = resolve_topology("shared_memory" if transport == "shared_memory" else None)
    ways = {}
    for name, (kept, settings) in setups.items():
        wrap = settings["wrap"] if kept is None else NamedUnits(*kept)
        setup = Setup(**{**settings, "wrap": wrap})
        torch.manual_seed(0)
        program = program_of(name.partition(",")[0])
        trained = train(program, setup, topology, Nothing(), steps=0)
        ways[name] = Way(program, setup, trained, Sample.of(program, setup, topology))
    for done in range(WARM + ROUNDS):
        for name, way in ways.items():
            for turn in range(TURNS.get(name.partition(",")[0], 1)):
                way.turn(topology, sample_first=(done + turn) % 2 == 0, is_timed=done >= WARM)
    topology.shard.barrier()
    if number == 0:
        for name, way in ways.items():
            timings = way.sample.timings()
            predicted = predict(rehearse(way.program, way.setup), ROUGH, timings).seconds
            found[name] = (predicted, way.seconds)
    topology.shard.barrier()
    torch.distributed.destroy_process_group()


def measured(transport: str) -> dict[str, tuple[float, list[float]]]:
    """For each way the predicted seconds of a step, and those of its steps, on the first of two ranks."""
    torch.set_num_threads(1)
    said = {}
    for name, setup in chosen(transport).items():
        settings = {"world_size": 2, "transport": transport, "wrap": setup.wrap}
        kept = None
        if isinstance(setup.wrap, NamedUnits):
            kept, settings["wrap"] = (dict(setup.wrap.frees), setup.wrap.forward_prefetch), None
        said[name] = (kept, settings)
    with tempfile.TemporaryDirectory() as folder, Manager() as manager:
        found = manager.dict()
        arguments = (str(Path(folder) / "store"), transport, said, found)
        spawn(rank, arguments, nprocs=2)  # type: ignore[no-untyped-call]
        return dict(found)


def rows() -> tuple[list[list[str]], list[list[str]]]:
    """The rows of both tables: predictions beside steps, and what is chosen beside each block."""
    made, choices = [], []
    for transport in ("shared_memory", "gloo"):
        found = measured(transport)
        said = transport.replace("_", " ")
        for name, (predicted, seconds) in found.items():
            median = statistics.median(seconds)
            low, _, high = statistics.quantiles(seconds, n=4)
            made.append(
                [
                    name,
                    said,
                    f"{predicted * 1e3:.1f}",
                    f"{median * 1e3:.1f}",
                    f"{low * 1e3:.1f} to {high * 1e3:.1f}",
                    f"{(predicted / median - 1) * 100:+.0f} %",
                ]
            )
            sys.stdout.write(" | ".join(made[-1]) + "\n")
        for name in MODELS:
            plain, planned = (found[f"{name}, {way}"][1] for way in ("each block", "planned"))
            choices.append([name, said, *beside(plain, planned)])
            sys.stdout.write(" | ".join(choices[-1]) + "\n")
    return made, choices


def beside(plain: Sequence[float], planned: Sequence[float]) -> list[str]:
    """What is chosen against each block as a unit: the ratios of neighbouring steps, and how many are below 1."""
    ratios = [mine / theirs for mine, theirs in zip(planned, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    wins = sum(ratio < 1 for ratio in ratios)
    return [f"{middle:.2f}", f"{low:.2f} to {high:.2f}", f"{wins} of {len(ratios)}"]
