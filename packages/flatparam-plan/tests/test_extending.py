"""The rehearsal of many equal blocks that is laid out from few: it is the whole one, to the byte."""

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm.testing import PATIENCE
from flatparam_plan.fitting.fastest import fit
from flatparam_plan.named_units import NamedUnits
from flatparam_plan.rehearsal import Rehearsal, rehearse
from flatparam_plan.repeated import extension
from flatparam_plan.repeated.extension import rehearse_repeated
from flatparam_plan.repeated.repeats import Template, runs_of
from flatparam_plan.training import Setup, TrainingProgram

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """A unit with two parts."""

    def __init__(self, width: int, layer_idx: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.layer_idx = layer_idx

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Wide(Block):
    """A block of another class."""


class Model(nn.Module):
    """Tokens to scores."""

    kinds: tuple[type[Block], ...] = (Block,) * 12

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, width)
        self.blocks = nn.ModuleList(kind(width, number) for number, kind in enumerate(self.kinds))
        self.head = nn.Linear(width, 500, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TwoKinds(Model):
    """Blocks of one class, and then of another."""

    kinds = (*(Block,) * 11, *(Wide,) * 13)


class Alternating(Model):
    """No two neighbours are equal."""

    kinds = (Block, Wide) * 6


class Counts(Model):
    """Does something with every fifth block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(torch.tanh(x)) if number % 5 == 0 else block(x)
        return self.head(x)


class Late(Model):
    """Does something else at a block that is left out, of which its blocks do not tell."""

    kinds = (Block,) * 24

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(torch.tanh(x)) if number == 15 else block(x)
        return self.head(x)


def on_meta(kind: Callable[[], nn.Module]) -> nn.Module:
    """The model without values."""
    with torch.device("meta"):
        return kind()


def program(kind: Callable[[], nn.Module]) -> TrainingProgram:
    """The program that trains the model."""
    return TrainingProgram.of(functools.partial(on_meta, kind), batch=2, sequence=8)


def both(kind: Callable[[], nn.Module], setup: Setup) -> tuple[Rehearsal, Rehearsal | None]:
    """The whole rehearsal, and the one that is laid out."""
    trained = program(kind)
    return rehearse(trained, setup), rehearse_repeated(trained, Template(on_meta(kind)), setup)


def entries(found: Rehearsal) -> list[tuple[Any, ...]]:
    """What happened, without the identity of the collectives."""
    return [
        (
            entry.kind,
            entry.stage,
            entry.step,
            entry.unit,
            entry.place,
            entry.start,
            entry.stop,
            entry.nbytes,
            entry.call and (entry.call.op, entry.call.label, entry.call.nbytes, entry.call.members),
        )
        for entry in found.entries
    ]


NAMES = {f"blocks.{number}": number < 10 for number in range(24)}
CASES: dict[str, tuple[type[Model], dict[str, Any]]] = {
    "cpu": (Model, {"wrap": "Block"}),
    "accelerator": (Model, {"wrap": ("Block",), "device": "accelerator", "forward_prefetch": 2}),
    "parts": (Model, {"wrap": ("Linear",), "max_norm": 1.0, "accumulate": 2, "use_orig_params": True}),
    "recomputed": (Model, {"wrap": ("Block",), "checkpointing": ("Block",), "param_dtype": torch.bfloat16}),
    "two kinds": (TwoKinds, {"wrap": ("Block", "Wide"), "strategy": "hybrid:2", "cpu_offload": True}),
    "some kept": (TwoKinds, {"wrap": NamedUnits({**NAMES, "head": True}, 2), "device": "accelerator"}),
    "some recomputed": (
        TwoKinds,
        {"wrap": NamedUnits(NAMES), "checkpointing": tuple(NAMES)[:11], "optimizer": "sgd"},
    ),
}


@each_row("case", CASES)
def test_what_is_laid_out_is_what_a_rehearsal_of_all_blocks_says(case: str) -> None:
    """Every event, the bytes in use after each change, every kernel, the units and the costs are equal."""
    kind, settings = CASES[case]
    whole, found = both(kind, Setup(**{"world_size": 4, **settings}))
    assert found is not None
    assert entries(found) == entries(whole)
    assert found.log.sizes == whole.log.sizes[: whole.stop]
    assert [found.works[n] for n in found.kernels] == [whole.works[n] for n in whole.kernels]
    assert found.units == whole.units
    assert found.costs == whole.costs
    place = found.log.place_of_peak(0, found.stop)
    assert found.log.alive_at(place) == whole.log.alive_at(place)


TWICE = """
import torch
from flatparam_plan.rehearsal import rehearse
from flatparam_plan.training import Setup, TrainingProgram

program = TrainingProgram.of(lambda: torch.nn.LayerNorm(4), torch.ones(2, 4))
before = torch.get_rng_state()
first, second = (rehearse(program, Setup(world_size=2)) for _ in range(2))
assert torch.equal(torch.get_rng_state(), before)
events = [[(each.kind, each.unit, each.place) for each in found.entries] for found in (first, second)]
assert events[0] == events[1], [pair for pair in zip(*events) if pair[0] != pair[1]][:3]
assert first.works == second.works
"""


def test_the_first_rehearsal_of_a_process_is_as_any_other() -> None:
    """No kernel that a layer runs once in a process is a part of it, nor does what comes before it draw random numbers."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TWICE], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


def test_blocks_that_differ_are_no_run() -> None:
    """Neighbours of different classes, blocks with a tied parameter, and few blocks are rehearsed whole."""
    setup = Setup(wrap=("Block", "Wide"))
    assert runs_of(Template(on_meta(Alternating)), setup) == []
    tied = on_meta(Model)
    assert isinstance(tied, Model)
    assert len(runs_of(Template(tied), setup)) == 1
    tied.blocks[5].up.weight = tied.blocks[6].up.weight  # type: ignore[union-attr]
    assert runs_of(Template(tied), setup) == []
    assert rehearse_repeated(program(Alternating), Template(on_meta(Alternating)), setup) is None


def test_a_parameter_that_no_unit_in_the_block_holds_is_no_run() -> None:
    """The root's size depends on the number of blocks then, and is padded."""
    assert runs_of(Template(on_meta(Model)), Setup(wrap=NamedUnits({f"blocks.{n}.up": True for n in range(12)}))) == []


def test_a_program_that_does_something_now_and_then_is_rehearsed_whole() -> None:
    """The tapes of two lengths differ by something that does not repeat for each block."""
    setup = Setup(world_size=2, wrap=("Block",))
    assert rehearse_repeated(program(Counts), Template(on_meta(Counts)), setup) is None


def test_the_planner_rehearses_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rehearsal has all blocks, and what is chosen is what rehearsals of all blocks would choose."""
    deep = type("Deep", (Model,), {"kinds": (Block,) * 40})
    setup = Setup(world_size=4, device="accelerator")
    sizes: list[int] = []

    def counted(trained: TrainingProgram, *args: Any, **kwargs: Any) -> Rehearsal:
        sizes.append(len(trained.build().blocks))
        return rehearse(trained, *args, **kwargs)

    monkeypatch.setattr(extension, "rehearse", counted)
    found = fit(program(deep), setup, memory=10**9, profile="h100")
    assert sizes
    assert max(sizes) < 20
    monkeypatch.setattr("flatparam_plan.planner.rehearse_repeated", lambda *_: None)
    assert fit(program(deep), setup, memory=10**9, profile="h100").table() == found.table()


def test_a_choice_of_few_units_is_rehearsed_with_all_blocks() -> None:
    """What few blocks do not show is seen in the end, and then everything is rehearsed whole."""
    setup = Setup(world_size=4, device="accelerator")
    assert rehearse_repeated(program(Late), Template(on_meta(Late)), attrs.evolve(setup, wrap="Block")) is not None
    found = fit(program(Late), setup, memory=10**9, profile="h100")
    assert not found.best.rehearsal.is_laid_out
    assert found.best.costs == rehearse(program(Late), found.best.setup).costs
