"""The full state of an optimizer over shards is the state of that optimizer over the unsharded model."""

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import Collectives
from flatparam_runtime import FlatParamError
from flatparam_state import model_state_dict, optimizer_state_dict

from .models import CASES, Case, mlp
from .optimizers import OPTIMIZERS, Keeper, adam, decay_groups
from .worlds import (
    assert_same_optimizer,
    assert_same_state,
    made_up_gradients,
    named_state,
    same_on_all,
    shard,
    shard_case,
    step,
)


def trained(case: Case, make: Any, without: Any = ((), ())) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The unsharded model and its optimizer after two steps."""
    model = case.build()
    optimizer = make(model.parameters())
    for seed, left_out in enumerate(without):
        step(model, optimizer, made_up_gradients(case.build(), seed, left_out))
    return model, optimizer


def train_sharded(case: Case, make: Any, ranks: Collectives, without: Any = ((), ()), **how: Any) -> Any:
    """The sharded model and its optimizer after the same two steps."""
    model = shard_case(case, ranks, **how)
    optimizer = make(model.parameters())
    for seed, left_out in enumerate(without):
        step(model, optimizer, made_up_gradients(case.build(), seed, left_out))
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("units", ["one unit", "every layer a unit"])
def test_state_is_that_of_the_unsharded_optimizer(name: str, units: str, use_orig_params: bool) -> None:
    """After two steps: the same names, and values and groups equal bit for bit; so are the parameters."""
    case, make = CASES[units], OPTIMIZERS[name]

    def rank(ranks: Collectives) -> Any:
        model, optimizer = train_sharded(case, make, ranks, use_orig_params=use_orig_params)
        return model_state_dict(model), optimizer_state_dict(model, optimizer)

    model, optimizer = trained(case, make)
    for parameters, state in same_on_all(3, rank):
        assert_same_state(parameters, model.state_dict())
        assert_same_optimizer(state, named_state(model, optimizer))


MODELS = [
    "tied around a unit",
    "odd shapes",
    "odd shapes in two units",
    "frozen",
    "frozen in units",
    "ignored",
    "lstm",
]


@each_row("world_size", [1, 2, 4])
@each_row("name", [*MODELS, "checkpointing inside a unit", "units in a plain parent", "shared module"])
def test_every_kind_of_model(name: str, world_size: int, use_orig_params: bool) -> None:
    """Tied, 0-d, empty, transposed, frozen, ignored and unsharded parameters appear as in the unsharded optimizer."""
    case = CASES[name]

    def rank(ranks: Collectives) -> Any:
        model, optimizer = train_sharded(case, adam, ranks, use_orig_params=use_orig_params)
        return optimizer_state_dict(model, optimizer)

    expected = named_state(*trained(case, adam))
    for state in same_on_all(world_size, rank):
        assert_same_optimizer(state, expected, ordered=use_orig_params)


@each_row("make", [adam, OPTIMIZERS["SGD momentum"]], ids=["Adam", "SGD"])
def test_parameters_without_a_gradient_have_no_state(make: Any) -> None:
    """With the original parameters shown, one that never got a gradient has no state, and none is made up."""
    case = CASES["every layer a unit"]
    without = (("0.weight", "2.bias"), ("0.weight",))

    def rank(ranks: Collectives) -> Any:
        model, optimizer = train_sharded(case, make, ranks, without, use_orig_params=True)
        return optimizer_state_dict(model, optimizer)

    expected = named_state(*trained(case, make, without))
    assert "0.weight" not in expected["state"], "the test needs a parameter without state"
    for state in same_on_all(3, rank):
        assert_same_optimizer(state, expected)


def test_steps_are_counted_per_parameter() -> None:
    """A parameter that sat one step out has its own step count, on ranks that hold none of it too."""
    case, without = CASES["one unit"], ((), ("2.weight",))

    def rank(ranks: Collectives) -> Any:
        model, optimizer = train_sharded(case, adam, ranks, without, use_orig_params=True)
        return optimizer_state_dict(model, optimizer)

    for state in same_on_all(4, rank):
        assert {fqn: int(values["step"]) for fqn, values in state["state"].items()} == {
            fqn: 1 if fqn == "2.weight" else 2
            for fqn in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
        }
        assert_same_optimizer(state, named_state(*trained(case, adam, without)))


def test_groups_with_settings_of_their_own() -> None:
    """Groups come out in order, with their settings and the names that they hold."""
    case = CASES["every layer a unit"]

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(decay_groups(model, names=lambda name: name.endswith("weight")), lr=0.1)

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=True)
        optimizer = groups(model)
        step(model, optimizer, made_up_gradients(case.build(), 0))
        return optimizer_state_dict(model, optimizer)

    reference = case.build()
    optimizer = groups(reference)
    step(reference, optimizer, made_up_gradients(case.build(), 0))
    for state in same_on_all(2, rank):
        assert_same_optimizer(state, named_state(reference, optimizer))


def test_groups_of_flat_parameters() -> None:
    """A group that holds a flat parameter lists the names of all its parameters."""

    def rank(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks, ("0", ""))
        flat = dict(model.named_parameters())
        optimizer = torch.optim.SGD(
            [{"params": [flat["0._flat_param"]], "lr": 0.5}, {"params": [flat["_flat_param"]], "lr": 0.25}]
        )
        return optimizer_state_dict(model, optimizer)["param_groups"]

    for first, second in same_on_all(2, rank):
        assert (first["params"], first["lr"]) == (["0.weight", "0.bias"], 0.5)
        assert (second["params"], second["lr"]) == (["2.weight", "2.bias", "4.weight", "4.bias"], 0.25)


def test_an_optimizer_that_never_stepped() -> None:
    """There are groups and no state."""

    def rank(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks)
        return optimizer_state_dict(model, adam(model.parameters()))

    for state in same_on_all(2, rank):
        assert state["state"] == {}
        assert state["param_groups"][0]["params"] == list(mlp().state_dict())


def test_an_optimizer_of_a_part_of_the_model(use_orig_params: bool) -> None:
    """Parameters that the optimizer does not hold are not in its state."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["every layer a unit"], ranks, use_orig_params=use_orig_params)
        optimizer = adam(model[2].parameters())
        step(model, optimizer, made_up_gradients(mlp(), 0))
        return optimizer_state_dict(model, optimizer)

    for state in same_on_all(2, rank):
        assert list(state["state"]) == state["param_groups"][0]["params"] == ["2.weight", "2.bias"]


def test_the_model_without_units() -> None:
    """A model that is not sharded gives its optimizer's state by name."""
    model = mlp()
    optimizer = adam(model.parameters())
    step(model, optimizer, made_up_gradients(model, 0))
    assert_same_optimizer(optimizer_state_dict(model, optimizer), named_state(model, optimizer))


def test_rank0_only(use_orig_params: bool) -> None:
    """Rank 0 gets the state; the others take part and get an empty dict."""

    def rank(ranks: Collectives) -> Any:
        model, optimizer = train_sharded(CASES["ignored"], adam, ranks, use_orig_params=use_orig_params)
        return optimizer_state_dict(model, optimizer, rank0_only=True)

    first, *others = same_on_all(3, rank)
    assert_same_optimizer(first, named_state(*trained(CASES["ignored"], adam)), ordered=use_orig_params)
    assert others == [{}, {}]


def test_values_that_are_not_shaped_like_the_parameter(use_orig_params: bool) -> None:
    """Strings, lists, numbers and None are kept as they are, beside what is gathered."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["every layer a unit"], ranks, use_orig_params=use_orig_params)
        optimizer = Keeper(model.parameters())
        step(model, optimizer, made_up_gradients(mlp(), 0))
        return optimizer_state_dict(model, optimizer)["state"]

    reference = CASES["every layer a unit"].build().state_dict()
    for state in same_on_all(2, rank):
        for fqn, parameter in reference.items():
            like = state[fqn].pop("like")
            assert torch.equal(like, parameter * 2)
            assert state[fqn] == {"text": "kept", "nothing": None, "count": 3, "history": [0.5, 0.25]}


@pytest.mark.parametrize("numel", [1, 3])
def test_tensors_that_are_not_shaped_like_the_parameter(use_orig_params: bool, numel: int) -> None:
    """A tensor of another shape is kept as it is, or refused by name; it is never cut or spread over the parameter."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["one unit"], ranks, use_orig_params=use_orig_params)
        optimizer = Keeper(model.parameters())
        step(model, optimizer, made_up_gradients(mlp(), 0))
        for values in optimizer.state.values():
            values["window"] = torch.arange(numel, dtype=torch.float32)
        try:
            return optimizer_state_dict(model, optimizer)["state"]
        except FlatParamError as error:
            return str(error)

    for state in same_on_all(2, rank):
        if isinstance(state, str):
            assert "'window' of '" in state
            assert any(f"'{name}'" in state for name in mlp().state_dict())
        else:
            for values in state.values():
                assert torch.equal(values["window"], torch.arange(numel, dtype=torch.float32))


def test_the_state_owns_its_memory(use_orig_params: bool) -> None:
    """Changing the saved tensors does not change the optimizer, and the next step does not change them."""

    def rank(ranks: Collectives) -> Any:
        model, optimizer = train_sharded(CASES["ignored"], adam, ranks, use_orig_params=use_orig_params)
        first = optimizer_state_dict(model, optimizer)
        for values in first["state"].values():
            for value in values.values():
                value.fill_(-1.0)
        second = optimizer_state_dict(model, optimizer)
        step(model, optimizer, made_up_gradients(CASES["ignored"].build(), 5))
        return first, second

    expected = named_state(*trained(CASES["ignored"], adam))
    for first, second in same_on_all(2, rank):
        assert all(bool((v == -1.0).all()) for values in first["state"].values() for v in values.values())
        assert_same_optimizer(second, expected, ordered=use_orig_params)


def test_moments_keep_memory_order_and_dtype(use_orig_params: bool) -> None:
    """A moment of a channels_last weight is channels_last; one of a bf16 weight is bf16."""
    case = Case(
        lambda: nn.Sequential(nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last), nn.Linear(2, 2).bfloat16())
    )

    def rank(ranks: Collectives) -> Any:
        model, optimizer = train_sharded(case, adam, ranks, use_orig_params=use_orig_params)
        return optimizer_state_dict(model, optimizer)["state"]

    for state in same_on_all(2, rank):
        assert state["0.weight"]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
        assert state["1.weight"]["exp_avg"].dtype is torch.bfloat16


def test_parameters_of_another_model_are_refused(use_orig_params: bool) -> None:
    """An optimizer that holds a parameter which is not the model's: the error says which one, and what to do."""

    def rank(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks, use_orig_params=use_orig_params)
        optimizer = adam([*model.parameters(), nn.Parameter(torch.zeros(2, 9))])
        with pytest.raises(FlatParamError) as caught:
            optimizer_state_dict(model, optimizer)
        return str(caught.value)

    for message in same_on_all(2, rank):
        assert "(2, 9)" in message
        assert "create the optimizer from model.parameters() after sharding" in message


@each_row("use_orig_params", [False, True], ids=["flat", "originals"])
def test_an_optimizer_from_before_sharding(use_orig_params: bool) -> None:
    """L-07: it holds the originals, which are views of the shard now: it trains, and its state is saved as ever."""

    def rank(ranks: Collectives) -> Any:
        model = CASES["one unit"].build()
        optimizer = adam(model.parameters())
        shard(model, ranks, use_orig_params=use_orig_params)
        for seed in (0, 1):
            step(model, optimizer, made_up_gradients(mlp(), seed))
        return optimizer_state_dict(model, optimizer)

    for state in same_on_all(2, rank):
        assert_same_optimizer(state, named_state(*trained(CASES["one unit"], adam)))
