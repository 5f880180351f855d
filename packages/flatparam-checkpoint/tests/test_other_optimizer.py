"""The state of a different optimizer is refused by name; what is that of the same kind of optimizer is not."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatparam_checkpoint import Checkpointer
from flatparam_comm import Collectives
from flatparam_comm.testing import run_threads
from flatparam_files import CheckpointError

from .beneath import OPTIMIZERS, Keeper, Make, Setup, Ticker, adam
from .runs import saved


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The one of which the report was."""
    return torch.optim.AdamW(parameters, lr=0.1)


def load(make: Make, root: Path, *, use_orig_params: bool, steps: int = 0, **options: Any) -> list[str]:
    """Load into the optimizer that `make` makes, after so many steps of it; returns what each rank says."""
    setup = Setup(2, make=make, use_orig_params=use_orig_params)

    def rank(world: Collectives) -> str:
        model, optimizer = setup.build(world)
        setup.train(model, optimizer, range(steps))
        try:
            Checkpointer(root, model, optimizer, ranks=world).load(**options)
        except CheckpointError as error:
            return str(error)
        if not options:
            setup.train(model, optimizer, range(1))
        return ""

    return run_threads(2, rank)


@pytest.mark.parametrize("steps", [0, 1])
def test_adamw_into_sgd_with_momentum(steps: int, use_orig_params: bool, tmp_path: Path) -> None:
    """Every rank says which parameter, and which states were expected and found; by an explicit choice it is loaded."""
    saved(Setup(2, make=adamw, use_orig_params=use_orig_params), tmp_path)
    sgd = OPTIMIZERS["SGD momentum"]
    said = load(sgd, tmp_path, use_orig_params=use_orig_params, steps=steps)
    assert said[0] == said[1]
    for words in (
        "optimizer state of '",
        "expected 'momentum_buffer', which SGD has, found 'exp_avg', 'exp_avg_sq'",
        "load with other_states=True",
    ):
        assert words in said[0], said
    assert load(sgd, tmp_path, use_orig_params=use_orig_params, steps=steps, other_states=True) == ["", ""]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Keeper", "Ticker"])
def test_an_optimizer_into_itself(name: str, use_orig_params: bool, tmp_path: Path) -> None:
    """Every optimizer takes its own state, before and after its first step, and steps on."""
    make: Make = {**OPTIMIZERS, "Keeper": Keeper, "Ticker": Ticker}[name]
    saved(Setup(2, make=make, use_orig_params=use_orig_params), tmp_path)
    for steps in (0, 1):
        assert load(make, tmp_path, use_orig_params=use_orig_params, steps=steps) == ["", ""]


def test_which_optimizers_take_whose_state(tmp_path: Path) -> None:
    """An optimizer takes states that it can go on with, also if there are more, and refuses any others."""
    refused = set()
    names = ["SGD momentum", "Adam", "AdamW amsgrad", "RMSprop", "Adagrad"]
    for first, second in itertools.permutations(names, 2):
        root = tmp_path / first / second
        saved(Setup(2, make=OPTIMIZERS[first]), root, steps=1)
        if load(OPTIMIZERS[second], root, use_orig_params=False, other_states=False)[0]:
            refused.add((first, second))
    assert set(itertools.permutations(names, 2)) - refused == {
        ("AdamW amsgrad", "Adam"),
        ("RMSprop", "SGD momentum"),
    }


def test_states_that_come_later(tmp_path: Path) -> None:
    """A checkpoint from before the first step, and one of an optimizer without states, load into any optimizer."""
    for number, (make, steps) in enumerate(((adam, 0), (OPTIMIZERS["SGD"], 2))):
        root = tmp_path / str(number)
        saved(Setup(2, make=make), root, steps=steps)
        assert load(OPTIMIZERS["SGD momentum"], root, use_orig_params=False, other_states=False) == ["", ""]
