"""A module is taken out of a sharded model in the middle of training, and another one takes its place."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import Checkpointer, FullyShardedDataParallel, fully_shard
from flatparam.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from flatparam_comm import Collectives, FlatParamError, run_threads

RANKS = 2
DOORS = ["flat", "originals", "in place"]


def build(classes: int) -> nn.Sequential:
    torch.manual_seed(classes)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, classes))


def sharded(module: nn.Module, ranks: Collectives, door: str) -> Any:
    if door == "in place":
        return fully_shard(module, mesh=ranks)
    return FullyShardedDataParallel(module, ranks, use_orig_params=door == "originals")


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    out: torch.Tensor = model(torch.full((2, 4), rank + 1.0)).square().mean()
    return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None = None) -> None:
    """Step twice on the loss of one rank, or on the mean of all ranks' losses."""
    for _ in range(2):
        optimizer.zero_grad()
        for each in range(RANKS) if rank is None else [rank]:
            (loss(model, each) / (RANKS if rank is None else 1)).backward()
        optimizer.step()


def with_a_new_head() -> dict[str, torch.Tensor]:
    """Return the parameters of a model of one process that had another head at first."""
    model = build(3)
    train(model, torch.optim.AdamW(model.parameters()))
    model[2] = build(2)[2]
    train(model, torch.optim.AdamW(model.parameters()))
    return model.state_dict()


@pytest.mark.parametrize("door", DOORS)
@each_row("kept", [False, True])
def test_a_head_is_replaced(kept: bool, door: str, tmp_path: Path) -> None:
    """A new head that is sharded trains as in one process, also if the old one is kept; a checkpoint has only the new."""

    def rank(ranks: Collectives) -> tuple[dict[str, torch.Tensor], list[str], dict[str, Any]]:
        module = build(3)
        model = sharded(module, ranks, door)
        old = torch.optim.AdamW(model.parameters())
        train(model, old, ranks.rank)
        head = module[2] if kept else None
        module[2] = sharded(build(2)[2], ranks, door)
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, ranks.rank)
        assert (head is not None) is kept
        if door != "flat":
            # A flat parameter still has the parts of both.
            with pytest.raises(FlatParamError, match=r"parameter 2 of the optimizer .* is none of the model's"):
                get_optimizer_state_dict(model, old)
        Checkpointer(tmp_path, model, optimizer).save(1)
        fresh = build(2)
        again = sharded(fresh, ranks, door)
        loaded = torch.optim.AdamW(again.parameters())
        report = Checkpointer(tmp_path, again, loaded).load()
        assert report is not None
        assert not report.missing
        assert not report.unexpected
        full = StateDictOptions(full_state_dict=True)
        states = get_optimizer_state_dict(again, loaded, options=full)
        before = get_optimizer_state_dict(model, optimizer, options=full)
        assert states["param_groups"] == before["param_groups"]
        for name, values in before["state"].items():
            for key, value in values.items():
                assert torch.equal(states["state"][name][key], value), (name, key)
        found = {name: whole(value) for name, value in again.state_dict().items()}
        return found, [*model.state_dict()], states["state"]

    expected = with_a_new_head()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_threads(RANKS, rank)
    told = [str(each.message) for each in caught if "was taken out of the model" in str(each.message)]
    assert bool(told) is not kept
    for found, names, states in results:
        assert names == [*expected] == [*states] == [*found]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def whole(value: torch.Tensor) -> torch.Tensor:
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()


@pytest.mark.parametrize("door", DOORS)
def test_a_plain_module_takes_the_place(door: str) -> None:
    """One without parameters trains on as in one process; of one with some, each rank warns after a new optimizer's step."""

    def rank(ranks: Collectives) -> torch.Tensor:
        module = build(3)
        model = sharded(module, ranks, door)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer, ranks.rank)
        module[2] = nn.Identity()
        train(model, optimizer, ranks.rank)
        with torch.no_grad():
            found: torch.Tensor = loss(model, 0)
        module[2] = build(2)[2]
        train(model, torch.optim.SGD(model.parameters(), 0.1), ranks.rank)
        return found

    model = build(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer)
    model[2] = nn.Identity()
    train(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for found in run_threads(RANKS, rank):
            torch.testing.assert_close(found, loss(model, 0).detach())
    assert sum("no unit holds '2.weight'" in str(each.message) for each in caught) == RANKS


@pytest.mark.parametrize("door", DOORS)
def test_a_copy_of_what_was_changed(door: str) -> None:
    """A copy has what was taken out, too, and computes as the model does."""

    def rank(ranks: Collectives) -> None:
        module = build(3).append(nn.BatchNorm1d(3))
        model = sharded(module, ranks, door)
        train(model, torch.optim.SGD(model.parameters(), 0.1), ranks.rank)
        module[2], module[3] = nn.Identity(), nn.Identity()
        with torch.no_grad():
            before = loss(model, ranks.rank)
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert torch.equal(loss(copied, ranks.rank), before)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_threads(RANKS, rank)
