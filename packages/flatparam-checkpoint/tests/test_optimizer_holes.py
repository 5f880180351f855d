"""If one rank's optimizer lacks what another's has, every rank is told which, and no checkpoint is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatparam_checkpoint import Checkpointer
from flatparam_comm import Collectives
from flatparam_files import CheckpointError
from flatparam_state import optimizer_state_dict

from .beneath import (
    adam,
    assert_same_optimizer,
    lacking_a_parameter,
    lacking_a_step,
    made_up_gradients,
    mlp,
    named_state,
    same_on_all,
    shard,
    step,
)

UNITS = ("0", "2", "")


def save_files(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Collectives, path: Path) -> None:
    with Checkpointer(path, model, optimizer, ranks=ranks) as checkpointer:
        checkpointer.save(3)


def save_in_the_background(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Collectives, path: Path) -> None:
    with Checkpointer(path, model, optimizer, ranks=ranks, asynchronous=True) as checkpointer:
        checkpointer.save(3)


@pytest.mark.parametrize("save", [save_files, save_in_the_background])
@pytest.mark.parametrize(("make", "lacks"), [(lacking_a_parameter, "does not hold"), (lacking_a_step, "has no state")])
def test_a_hole_is_refused(
    make: Callable[..., torch.optim.Optimizer],
    lacks: str,
    save: Callable[..., None],
    use_orig_params: bool,
    tmp_path: Path,
) -> None:
    """Every rank raises an error that names rank 1 and a parameter; no checkpoint is there after it."""

    def rank(ranks: Collectives) -> str:
        model = shard(mlp(), ranks, UNITS, use_orig_params=use_orig_params)
        optimizer = make(model, ranks.rank)
        step(model, optimizer, made_up_gradients(mlp(), 0))
        with pytest.raises(CheckpointError) as caught:
            save(model, optimizer, ranks, tmp_path)
        assert (caught.value.rank, caught.value.fqn is not None) == (1, True)
        return str(caught.value)

    messages = same_on_all(2, rank)
    assert messages[0] == messages[1]
    assert "rank 1 " + lacks in messages[0]
    assert any(repr(name) in messages[0] for name, _ in mlp().named_parameters())
    assert not list(tmp_path.glob("step-*"))


def test_what_rank_0_has_nothing_of_is_in_the_checkpoints_groups(tmp_path: Path) -> None:
    """A checkpoint of optimizers without empty originals loads into one that holds all, at a different world size."""
    gradients = made_up_gradients(mlp(), 0)

    def save(ranks: Collectives) -> None:
        model = shard(mlp(), ranks, UNITS, use_orig_params=True)
        optimizer = adam([p for p in model.parameters() if p.numel()])
        step(model, optimizer, gradients)
        save_files(model, optimizer, ranks, tmp_path)

    def load(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks, ("",))
        optimizer = adam(model.parameters())
        with Checkpointer(tmp_path, model, optimizer, ranks=ranks) as checkpointer:
            checkpointer.load()
        return optimizer_state_dict(model, optimizer)

    plain = mlp()
    whole = adam(plain.parameters())
    step(plain, whole, gradients)
    same_on_all(4, save)
    for found in same_on_all(2, load):
        assert_same_optimizer(found, named_state(plain, whole), ordered=False)


def test_the_order_of_an_optimizers_own_state(use_orig_params: bool, tmp_path: Path) -> None:
    """The entries of a parameter's state keep the optimizer's order when it is saved and read from files."""
    order = ["step", "exp_avg", "exp_avg_sq"]

    def rank(ranks: Collectives) -> None:
        model = shard(mlp(), ranks, UNITS, use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        step(model, optimizer, made_up_gradients(mlp(), 0))
        with Checkpointer(tmp_path, model, optimizer, ranks=ranks) as checkpointer:
            checkpointer.save(1)
            checkpointer.load()
        assert {tuple(values) for values in optimizer.state.values()} == {tuple(order)}

    same_on_all(2, rank)
