"""A full optimizer state goes back into an optimizer over shards, at any world size, in any units and exposure."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import Collectives
from flatparam_state import load_optimizer_state, model_state_dict, optimizer_state_dict

from .models import CASES, Case, Nested, Odd, mlp
from .optimizers import OPTIMIZERS, Keeper, Ticker, adam, decay_groups
from .worlds import (
    assert_same_optimizer,
    assert_same_state,
    load,
    made_up_gradients,
    named_state,
    same_on_all,
    shard,
    shard_case,
    step,
)


def saved_plainly(case: Case, make: Any, steps: int = 2, without: Any = ()) -> tuple[Any, Any]:
    """Parameters and optimizer state, by name, of the unsharded model after some steps."""
    model = case.build()
    optimizer = make(model.parameters())
    for seed in range(steps):
        step(model, optimizer, made_up_gradients(case.build(), seed, without if seed == 0 else ()))
    return copy.deepcopy((dict(model.state_dict()), named_state(model, optimizer)))


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, state: Any, optimizer_state: Any) -> None:
    """Load both."""
    load(model, state)
    optimizer.load_state_dict(load_optimizer_state(model, optimizer, optimizer_state))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_optimizers_state_is_loaded_and_goes_on(name: str, use_orig_params: bool) -> None:
    """The unsharded optimizer's state, re-keyed by name, is taken over; the next step is equal to its, bit for bit."""
    case, make = CASES["every layer a unit"], OPTIMIZERS[name]
    state, optimizer_state = saved_plainly(case, make)

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8)
        optimizer = make(model.parameters())
        resume(model, optimizer, state, optimizer_state)
        taken = optimizer_state_dict(model, optimizer)
        step(model, optimizer, made_up_gradients(mlp(), 2))
        return taken, model_state_dict(model), optimizer_state_dict(model, optimizer)

    later_state, later_optimizer = saved_plainly(case, make, steps=3)
    for taken, parameters, after in same_on_all(3, rank):
        assert_same_optimizer(taken, optimizer_state)
        assert_same_state(parameters, later_state)
        assert_same_optimizer(after, later_optimizer)


KINDS = [
    "tied around a unit",
    "shared module",
    "odd shapes",
    "frozen in units",
    "ignored",
    "lstm",
    "units in a plain parent",
]


@each_row("world_size", [1, 2, 4])
@each_row("name", KINDS)
def test_every_kind_of_model(name: str, world_size: int, use_orig_params: bool) -> None:
    """What was saved is what is saved after loading it: tied, 0-d, empty, frozen, ignored, unsharded parameters too."""
    _, optimizer_state = saved_plainly(CASES[name], adam)

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES[name], ranks, use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        optimizer.load_state_dict(load_optimizer_state(model, optimizer, optimizer_state))
        return optimizer_state_dict(model, optimizer)

    for found in same_on_all(world_size, rank):
        assert_same_optimizer(found, optimizer_state, ordered=use_orig_params)


@pytest.mark.parametrize("exposures", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("name", ["Adam", "SGD momentum"])
def test_other_world_size_other_units_other_exposure(
    name: str, sizes: tuple[int, int], exposures: tuple[bool, bool]
) -> None:
    """A state saved by one sharding is loaded by another that differs in all three, and training goes on the same."""
    make = OPTIMIZERS[name]

    def save(ranks: Collectives) -> Any:
        model = shard(Case(Nested).build(), ranks, ("inner", ""), use_orig_params=exposures[0])
        optimizer = make(model.parameters())
        for seed in (0, 1):
            step(model, optimizer, made_up_gradients(Nested(), seed))
        return model_state_dict(model), optimizer_state_dict(model, optimizer)

    saved = same_on_all(sizes[0], save)[0]

    def restore(ranks: Collectives) -> Any:
        model = shard(Case(Nested).build(8), ranks, ("last", "inner.1.0", ""), use_orig_params=exposures[1])
        optimizer = make(model.parameters())
        resume(model, optimizer, *copy.deepcopy(saved))
        step(model, optimizer, made_up_gradients(Nested(), 2))
        return model_state_dict(model), optimizer_state_dict(model, optimizer)

    state, optimizer_state = saved_plainly(Case(Nested), make, steps=3)
    for parameters, after in same_on_all(sizes[1], restore):
        assert_same_state(parameters, state)
        assert_same_optimizer(after, optimizer_state, ordered=False)


@each_row("name", ["Adam", "SGD momentum", "AdamW amsgrad"])
def test_training_goes_on_as_if_it_had_not_stopped(name: str, use_orig_params: bool) -> None:
    """Two steps, saving, a new model and optimizer, loading, two steps: the bits of four steps at a stretch."""
    case, make = CASES["nested units"], OPTIMIZERS[name]

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, rank: int) -> None:
        for number in numbers:
            torch.manual_seed(100 * number + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()

    def rank(ranks: Collectives, stop: bool) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params)
        optimizer = make(model.parameters())
        steps(model, optimizer, range(2), ranks.rank)
        if stop:
            saved = copy.deepcopy((model_state_dict(model), optimizer_state_dict(model, optimizer)))
            model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8)
            optimizer = make(model.parameters())
            resume(model, optimizer, *saved)
        steps(model, optimizer, range(2, 4), ranks.rank)
        return model_state_dict(model), optimizer_state_dict(model, optimizer)

    for stopped, straight in zip(same_on_all(2, rank, True), same_on_all(2, rank, False), strict=True):
        assert_same_state(stopped[0], straight[0])
        assert_same_optimizer(stopped[1], straight[1])


def test_an_optimizer_in_use_takes_another_state(use_orig_params: bool) -> None:
    """What is loaded replaces moments and steps that are there."""
    case = CASES["every layer a unit"]
    _, optimizer_state = saved_plainly(case, adam)

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        for seed in range(5):
            step(model, optimizer, made_up_gradients(mlp(), 50 + seed))
        optimizer.load_state_dict(load_optimizer_state(model, optimizer, optimizer_state))
        return optimizer_state_dict(model, optimizer)

    for found in same_on_all(2, rank):
        assert_same_optimizer(found, optimizer_state)


def test_parameters_without_state() -> None:
    """Parameters that are not in the saved state have none afterwards; the others keep their own step counts."""
    case = CASES["one unit"]
    _, some = saved_plainly(case, adam, steps=1, without=("0.weight", "4.bias"))
    _, uneven = saved_plainly(case, adam, steps=2, without=("0.weight",))

    def rank(ranks: Collectives, saved: Any) -> Any:
        model = shard_case(case, ranks, use_orig_params=True)
        optimizer = adam(model.parameters())
        optimizer.load_state_dict(load_optimizer_state(model, optimizer, saved))
        return optimizer_state_dict(model, optimizer)

    assert "0.weight" not in some["state"]
    assert int(uneven["state"]["0.weight"]["step"]) == 1
    for saved in (some, uneven):
        for found in same_on_all(3, rank, saved):
            assert_same_optimizer(found, saved)


def test_groups_come_back_with_their_settings(use_orig_params: bool) -> None:
    """Learning rates and decays of each group are those that were saved, not those of the new optimizer."""
    case = CASES["every layer a unit"]

    def groups(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(decay_groups(model, names=lambda name: name.startswith("2.")), **more)

    reference = case.build()
    optimizer = groups(reference, lr=0.1)
    step(reference, optimizer, made_up_gradients(mlp(), 0))
    optimizer.param_groups[0]["lr"] = 0.0125  # as a scheduler would
    saved = named_state(reference, optimizer)

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params)
        fresh = groups(model, lr=0.7)
        fresh.load_state_dict(load_optimizer_state(model, fresh, saved))
        return optimizer_state_dict(model, fresh)

    for found in same_on_all(2, rank):
        assert_same_optimizer(found, saved)


@each_row("others", [0, 1])
def test_a_group_without_parameters_comes_back_by_its_place(others: int, use_orig_params: bool) -> None:
    """It has the settings of the saved group there, as in torch, unless the saved optimizer has other groups."""
    case = CASES["every layer a unit"]

    def groups(model: nn.Module, lr: float, empty: int) -> torch.optim.Optimizer:
        first: dict[str, Any] = {"params": [*model.parameters()], "lr": lr}
        return torch.optim.AdamW([first, *({"params": [], "lr": 2 * lr} for _ in range(empty))])

    model = case.build()
    optimizer = groups(model, 0.25, 1 + others)
    step(model, optimizer, made_up_gradients(case.build(), 0))
    saved = copy.deepcopy(named_state(model, optimizer))

    def rank(ranks: Collectives) -> list[float]:
        model = shard_case(case, ranks, use_orig_params=use_orig_params)
        optimizer = groups(model, 1.0, 1)
        optimizer.load_state_dict(load_optimizer_state(model, optimizer, saved))
        return [group["lr"] for group in optimizer.param_groups]

    for found in same_on_all(2, rank):
        assert found == [0.25, 2.0 if others else 0.5]


@pytest.mark.parametrize("empty_first", [False, True])
def test_zero_d_parameters_only(use_orig_params: bool, empty_first: bool) -> None:
    """Where every parameter is 0-d, so is every moment, and it is still told from a step count."""

    class Scalars(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if empty_first:
                self.none = nn.Parameter(torch.empty(0))
            self.a = nn.Parameter(torch.randn(()))
            self.b = nn.Parameter(torch.randn(()))

    case = Case(Scalars)
    state, optimizer_state = saved_plainly(case, adam)

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8)
        optimizer = adam(model.parameters())
        resume(model, optimizer, state, optimizer_state)
        taken = optimizer_state_dict(model, optimizer)
        step(model, optimizer, made_up_gradients(Scalars(), 2))
        return taken, model_state_dict(model)

    later, _ = saved_plainly(case, adam, steps=3)
    for taken, parameters in same_on_all(2, rank):
        assert_same_optimizer(taken, optimizer_state)
        assert_same_state(parameters, later)


@pytest.mark.parametrize("make", [adam, Ticker])
def test_zero_d_parameters_beside_others(use_orig_params: bool, make: Any) -> None:
    """The moment of a 0-d parameter is loaded as a moment, a count as a count, whatever its name."""
    state, optimizer_state = saved_plainly(Case(Odd), make)

    def rank(ranks: Collectives) -> Any:
        model = shard(Case(Odd).build(8), ranks, use_orig_params=use_orig_params)
        optimizer = make(model.parameters())
        resume(model, optimizer, state, optimizer_state)
        assert_same_optimizer(optimizer_state_dict(model, optimizer), optimizer_state, ordered=False)
        step(model, optimizer, made_up_gradients(Odd(), 2))
        return model_state_dict(model)

    later, _ = saved_plainly(Case(Odd), make, steps=3)
    for parameters in same_on_all(3, rank):
        assert_same_state(parameters, later)


def test_the_loaded_state_is_a_copy(use_orig_params: bool) -> None:
    """Training afterwards leaves the tensors that were loaded as they were; so one dict serves all ranks."""
    case = CASES["ignored"]
    _, optimizer_state = saved_plainly(case, adam)
    kept = copy.deepcopy(optimizer_state)

    def rank(ranks: Collectives) -> None:
        model = shard_case(case, ranks, use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        optimizer.load_state_dict(load_optimizer_state(model, optimizer, optimizer_state))
        step(model, optimizer, made_up_gradients(case.build(), 2))

    same_on_all(2, rank)
    assert_same_optimizer(optimizer_state, kept)


def test_loading_communicates_nothing(use_orig_params: bool) -> None:
    """A rank can load while the others do something else."""
    case = CASES["every layer a unit"]
    _, optimizer_state = saved_plainly(case, adam)

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        if ranks.rank:
            ranks.barrier(label="rank 0 has loaded")
        optimizer.load_state_dict(load_optimizer_state(model, optimizer, optimizer_state))
        if not ranks.rank:
            ranks.barrier(label="rank 0 has loaded")
        return optimizer_state_dict(model, optimizer)

    for found in same_on_all(2, rank):
        assert_same_optimizer(found, optimizer_state)


def test_values_that_are_no_tensors(use_orig_params: bool) -> None:
    """Strings, lists, numbers and None come back as they were, for every parameter of the optimizer."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["one unit"], ranks, use_orig_params=use_orig_params)
        optimizer = Keeper(model.parameters())
        step(model, optimizer, made_up_gradients(mlp(), 0))
        saved = optimizer_state_dict(model, optimizer)
        # torch's own load_state_dict would turn a string into a generator: what it is given is compared
        found = load_optimizer_state(model, Keeper(model.parameters()), saved)
        return found["state"], optimizer.state_dict()["state"]

    for found, expected in same_on_all(2, rank):
        assert _plain(found) == _plain(expected)


def _plain(state: Mapping[int, Mapping[str, Any]]) -> Any:
    return {
        number: {name: value.tolist() if torch.is_tensor(value) else value for name, value in values.items()}
        for number, values in state.items()
    }
