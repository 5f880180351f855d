"""Ranks that load, average or scale different numbers: an error on every rank, before the numbers are used."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardedEMA, ShardingStrategy, clip_grad_norm_, fully_shard
from flatparam.sharded_grad_scaler import ShardedGradScaler
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, RankError

from .models import mlp, seeded
from .worlds import inputs, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated")
LINEAR = ModuleWrapPolicy({nn.Linear})


def in_place() -> nn.Module:
    model = seeded(mlp)
    fully_shard(model[0])
    fully_shard(model)
    return model


SHARDINGS: dict[str, Callable[[], nn.Module]] = {
    "flat": lambda: FSDP(seeded(mlp), auto_wrap_policy=LINEAR),
    "original": lambda: FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=True),
    "whole": lambda: FSDP(seeded(mlp), sharding_strategy=ShardingStrategy.NO_SHARD),
    "in-place": in_place,
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(inputs(rank)[0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@each_row("which", ["one", "all"])
@each_row("how", SHARDINGS)
def test_a_full_state_of_other_values_on_one_rank_is_refused(how: str, which: str) -> None:
    """load_state_dict() of full tensors that differ by rank names the parameter and the ranks, and changes nothing."""

    def rank(world: Collectives) -> None:
        model = SHARDINGS[how]()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        other = {name: value + (world.rank == 1) for name, value in before.items()}
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict({**before, "0.bias": other["0.bias"]} if which == "one" else other)
        name = "0.bias" if which == "one" else "0.weight"
        assert f"parameter '{name}': expected the same values on all ranks, found different ones on rank 1" in str(
            caught.value
        )
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        model.load_state_dict({name: value + 1 for name, value in before.items()})

    on_ranks(2, rank)


@each_row("how", SHARDINGS)
def test_a_state_that_lacks_a_parameter_on_one_rank_is_refused(how: str) -> None:
    """With `strict=False`, too, a parameter is loaded on all ranks or on none."""

    def rank(world: Collectives) -> None:
        model = SHARDINGS[how]()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        other = {name: value + 1 for name, value in before.items() if world.rank == 0 or name != "0.weight"}
        with pytest.raises(
            RuntimeError, match=r"parameter '0.weight': expected it on all ranks, and there is none on rank 1"
        ):
            model.load_state_dict(other, strict=False)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        model.load_state_dict({"0.bias": before["0.bias"]}, strict=False)

    on_ranks(2, rank)


def test_values_that_differ_in_a_buffer_are_each_ranks_own() -> None:
    """Buffers are not sharded: each rank loads its own."""

    def rank(world: Collectives) -> float:
        model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        state = model.state_dict()
        state["1.running_mean"].fill_(world.rank)
        model.load_state_dict(state)
        return float(model.state_dict()["1.running_mean"][0])

    assert on_ranks(2, rank) == [0.0, 1.0]


@each_row("how", ["flat", "original"])
def test_an_optimizer_state_of_other_values_on_one_rank_is_told(how: str) -> None:
    """The next pass after it raises, on every rank, before a step; equal values go on."""

    def rank(world: Collectives, differs: bool) -> str:
        model = SHARDINGS[how]()
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer, world.rank)
        state = FSDP.optim_state_dict(model, optimizer)
        if differs and world.rank:
            for values in state["state"].values():
                values["exp_avg"].mul_(2)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
        try:
            step(model, optimizer, world.rank)
        except RuntimeError as error:
            return str(error)
        return ""

    assert on_ranks(2, rank, False) == ["", ""]
    for told in on_ranks(2, rank, True):
        assert re.search("rank 1 was at the load of an optimizer state with the values", told), told


def _decay(averages: ShardedEMA, model: nn.Module, rank: int) -> None:
    averages.decay = 0.5 if rank else 0.9
    averages.update()


def _left_out(averages: ShardedEMA, model: nn.Module, rank: int) -> None:
    if not rank:
        averages.update()


WAYS: dict[str, Callable[..., None]] = {"decay": _decay, "left out": _left_out}


@each_row("then", ["train", "evaluate", "state"])
@each_row("way", WAYS)
def test_averages_that_differ_by_rank_are_told(way: str, then: str) -> None:
    """Another decay on one rank, or an update that it leaves out, is told at the next pass or full state."""

    def rank(world: Collectives) -> None:
        model = SHARDINGS["original"]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averages = ShardedEMA(model, 0.9)
        step(model, optimizer, world.rank)
        averages.update()
        WAYS[way](averages, model, world.rank)
        if then == "train":
            step(model, optimizer, world.rank)
        elif then == "evaluate":
            with torch.no_grad():
                model(inputs(world.rank)[0])
        else:
            model.state_dict()

    with pytest.raises(RankError, match=r"have not done the same between passes: rank 0 was at the ShardedEMA.update"):
        on_ranks(2, rank)


@each_row("how", ["flat", "original", "in-place"])
def test_averages_on_one_rank_alone_are_told(how: str) -> None:
    """Half of the model from averages and half from weights is never evaluated or saved in silence."""

    def rank(world: Collectives, then: Callable[[nn.Module], Any]) -> None:
        model = SHARDINGS[how]()
        averages = ShardedEMA(model, 0.9)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), world.rank)
        if world.rank:
            with averages.applied(model):
                then(model)
        else:
            then(model)

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(inputs(0)[0])

    for then in (lambda model: model.state_dict(), evaluate):
        with pytest.raises(RankError, match=r"rank 1 was at the begin of ShardedEMA.applied\(\)"):
            on_ranks(2, rank, lambda model, then=then: then(model))


def test_torchs_clipping_to_another_norm_on_one_rank_is_told() -> None:
    """`flatparam.clip_grad_norm_`, which stands for torch's function, notes its arguments as the wrapper's does."""

    def rank(world: Collectives) -> None:
        model = SHARDINGS["original"]()
        for number in range(3):
            model(inputs(world.rank)[0]).square().mean().backward()
            clip_grad_norm_(model.parameters(), 2.0 if world.rank and number == 1 else 1.0)

    with pytest.raises(RankError, match=r"rank 1 was at the clip_grad_norm_\(max_norm=2.0, norm_type=2.0\)"):
        on_ranks(2, rank)


def test_another_scale_on_one_rank_is_told() -> None:
    """A scaler that was set to another scale on one rank is named at the next pass."""

    def rank(world: Collectives) -> None:
        model = SHARDINGS["original"]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=world)
        for number in range(3):
            scaler.scale(model(inputs(world.rank)[0]).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update(4.0 if world.rank and number == 0 else None)
            optimizer.zero_grad()

    with pytest.raises(RankError, match=r"unscale_\(\) of SGD by 0.125; rank 1 was at the unscale_\(\) of SGD by 0.25"):
        on_ranks(2, rank)


def _twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def _other(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.optim.SGD(model.parameters(), lr=1.0).zero_grad()


def _looks(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    repr(model)
    sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("more", [_twice, _other, _looks], ids=lambda each: each.__name__)
@pytest.mark.parametrize("how", ["flat", "original"])
def test_gradients_that_are_dropped_once_more_are_no_divergence(
    how: str, more: Callable[..., None], evaluates: bool
) -> None:
    """It counts whether gradients were dropped before the next reduction, not by whom, how often, or when."""

    def rank(world: Collectives) -> None:
        model = SHARDINGS[how]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            if world.rank == 0:
                more(model, optimizer)
            if evaluates:
                with torch.no_grad():
                    model(inputs(world.rank)[0])
            optimizer.zero_grad()
            model(inputs(world.rank)[0]).square().mean().backward()
            optimizer.step()
            if world.rank == 1:
                more(model, optimizer)
            model.state_dict()

    on_ranks(2, rank)


@each_row("swapped", [False, True], ids=["order", "rates"])
def test_groups_of_several_models(swapped: bool) -> None:
    """Each model is stepped with the rate of its own group: the order of groups does not matter, another rate does."""

    def rank(world: Collectives) -> None:
        parts = [SHARDINGS["flat"]() for _ in range(2)]
        rates = [0.1, 0.2] if not (swapped and world.rank) else [0.2, 0.1]
        groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in zip(parts, rates, strict=True)]
        optimizer = torch.optim.SGD(groups[::-1] if world.rank else groups, lr=1.0)
        for _ in range(2):
            for part in parts:
                part(inputs(world.rank)[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if swapped:
        with pytest.raises(RankError, match="the ranks have stepped differently"):
            on_ranks(2, rank)
    else:
        on_ranks(2, rank)


def test_clipping_of_spread_parameters_that_is_refused_is_not_noted() -> None:
    """A rank whose norm is refused by torch's function and which then clips as the others do has done the same."""

    def rank(world: Collectives) -> None:
        model = SHARDINGS["in-place"]()
        for _ in range(2):
            model(inputs(world.rank)[0]).square().mean().backward()
            if world.rank:
                with pytest.raises(ValueError, match="expected the order of a norm"):
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0, 0.0)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    on_ranks(2, rank)
