"""If one rank's optimizer lacks what another's has, every rank is told which, and nothing is written or changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import Collectives
from flatparam_runtime import FlatParamError
from flatparam_state import load_optimizer_state, optimizer_state_dict
from flatparam_state.optimizer.inventory import Inventory, first_hole

from .models import mlp
from .optimizers import adam, lacking_a_parameter, lacking_a_step
from .worlds import assert_same_optimizer, made_up_gradients, named_state, same_on_all, shard, step

UNITS = ("0", "2", "")


@pytest.mark.parametrize(("make", "lacks"), [(lacking_a_parameter, "does not hold"), (lacking_a_step, "has no state")])
def test_a_hole_is_refused(
    make: Callable[..., torch.optim.Optimizer],
    lacks: str,
    use_orig_params: bool,
) -> None:
    """Every rank raises an error that names rank 1 and a parameter."""

    def rank(ranks: Collectives) -> str:
        model = shard(mlp(), ranks, UNITS, use_orig_params=use_orig_params)
        optimizer = make(model, ranks.rank)
        step(model, optimizer, made_up_gradients(mlp(), 0))
        with pytest.raises(FlatParamError) as caught:
            optimizer_state_dict(model, optimizer)
        return str(caught.value)

    messages = same_on_all(2, rank)
    assert messages[0] == messages[1]
    assert "rank 1 " + lacks in messages[0]
    assert any(repr(name) in messages[0] for name, _ in mlp().named_parameters())


def test_loading_into_a_hole(use_orig_params: bool) -> None:
    """An optimizer that lacks a parameter on one rank is refused if states are sent between ranks; it is as it was."""
    model = mlp()
    whole = adam(model.parameters())
    step(model, whole, made_up_gradients(mlp(), 0))
    saved = named_state(model, whole)

    def rank(ranks: Collectives) -> str:
        model = shard(mlp(), ranks, UNITS, use_orig_params=use_orig_params)
        optimizer = lacking_a_parameter(model, ranks.rank)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(FlatParamError, match="rank 1 does not hold") as caught:
            load_optimizer_state(model, optimizer, saved, rank0_only=True)
        assert optimizer.state_dict() == before
        return str(caught.value)

    messages = same_on_all(2, rank)
    assert messages[0] == messages[1]


def test_an_error_of_one_rank_reaches_all(use_orig_params: bool) -> None:
    """A parameter of a different model in rank 1's optimizer is an error on rank 0 too, which says whose it is."""

    def rank(ranks: Collectives) -> str:
        model = shard(mlp(), ranks, UNITS, use_orig_params=use_orig_params)
        strangers = [nn.Parameter(torch.ones(2))] if ranks.rank == 1 else []
        optimizer = adam([*model.parameters(), *strangers])
        with pytest.raises(FlatParamError, match="is none of the model's") as caught:
            optimizer_state_dict(model, optimizer)
        return str(caught.value)

    messages = same_on_all(2, rank)
    assert messages[0].startswith("rank 1: ")


def test_what_a_rank_has_nothing_of_may_be_left_out() -> None:
    """Originals without elements on a rank need not be in its optimizer: the state is that of the unsharded model."""
    plain = mlp()
    whole = adam(plain.parameters())
    gradients = made_up_gradients(mlp(), 0)
    step(plain, whole, gradients)

    def rank(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks, UNITS, use_orig_params=True)
        optimizer = adam([p for p in model.parameters() if p.numel()])
        assert len(optimizer.param_groups[0]["params"]) < len(list(model.parameters()))
        step(model, optimizer, gradients)
        saved = optimizer_state_dict(model, optimizer)
        again = adam([p for p in model.parameters() if p.numel()])
        again.load_state_dict(load_optimizer_state(model, again, saved))
        for parameter, theirs in optimizer.state.items():
            for name, value in theirs.items():
                assert torch.equal(again.state[parameter][name], value), name
        return saved

    for saved in same_on_all(4, rank):
        assert_same_optimizer(saved, named_state(plain, whole), ordered=False)


def test_a_state_without_groups() -> None:
    """Of a state that has no groups, the state is returned under the parameters' names, and no groups."""

    def rank(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks, UNITS)
        optimizer = adam(model.parameters())
        step(model, optimizer, made_up_gradients(mlp(), 0))
        given = {"state": optimizer.state_dict()["state"]}
        found = optimizer_state_dict(model, optimizer, state_dict=given)
        assert_same_optimizer(
            {**found, "param_groups": []}, {**optimizer_state_dict(model, optimizer), "param_groups": []}
        )
        return list(found)

    assert same_on_all(2, rank) == [["state"], ["state"]]


def holds(owned: str, held: str, **states: str) -> Inventory:
    digits = {name: bytes(map(int, row)) for name, row in states.items()}
    return Inventory(b"", bytes(map(int, owned)), bytes(map(int, held)), digits)


@each_row(
    ("ranks", "expected"),
    [
        ([holds("11", "11"), holds("11", "11")], None),
        ([holds("11", "11"), holds("11", "10")], (1, "b")),
        ([holds("11", "01"), holds("10", "11")], (0, "a")),
        ([holds("10", "10"), holds("11", "11")], None),
        ([holds("11", "11", m="22"), holds("11", "11", m="20")], (1, "b")),
        ([holds("11", "11", m="22"), holds("10", "11", m="20")], None),
        ([holds("11", "11", m="22", q="10"), holds("11", "11", m="22")], None),
        ([holds("11", "11", q="10"), holds("11", "11")], (1, "a")),
        ([holds("11", "11", m="12"), holds("11", "11", m="21")], None),
    ],
)
def test_the_first_hole(ranks: list[Inventory], expected: tuple[int, str] | None) -> None:
    """A hole is what a rank with elements lacks; a value of one rank's own, beside other state, is none."""
    hole = first_hole(dict(enumerate(ranks)), ["a", "b"])
    assert (None if hole is None else (hole.rank, hole.fqn)) == expected


@pytest.mark.parametrize("rank0_only", [False, True])
def test_ranks_may_list_parameters_in_another_order(rank0_only: bool, use_orig_params: bool) -> None:
    """What each rank loads, and then saves, is found by name: the order of its optimizer's list does not matter."""
    plain = mlp()
    whole = adam(plain.parameters())
    step(plain, whole, made_up_gradients(mlp(), 0))
    expected = named_state(plain, whole)

    def rank(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks, UNITS, use_orig_params=use_orig_params)
        parameters = list(model.parameters())
        optimizer = adam(parameters[::-1] if ranks.rank else parameters)
        given = expected if ranks.rank == 0 or not rank0_only else {}
        optimizer.load_state_dict(load_optimizer_state(model, optimizer, given, rank0_only=rank0_only))
        return optimizer_state_dict(model, optimizer)

    for found in same_on_all(3, rank):
        assert_same_optimizer(found, expected, ordered=False)


def test_the_order_of_an_optimizers_own_state(use_orig_params: bool) -> None:
    """The entries of a parameter's state keep the optimizer's order when it is saved and loaded."""
    order = ["step", "exp_avg", "exp_avg_sq"]

    def rank(ranks: Collectives) -> None:
        model = shard(mlp(), ranks, UNITS, use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        step(model, optimizer, made_up_gradients(mlp(), 0))
        saved = optimizer_state_dict(model, optimizer)
        assert {tuple(values) for values in saved["state"].values()} == {tuple(order)}
        loaded = load_optimizer_state(model, optimizer, saved)
        assert {tuple(values) for values in loaded["state"].values()} == {tuple(order)}

    same_on_all(2, rank)


def test_parameters_that_no_unit_holds_may_be_missing(use_orig_params: bool) -> None:
    """What is left whole, and was in nobody's optimizer, is passed over in the groups of a state that is loaded."""

    def rank(ranks: Collectives) -> None:
        model = shard(mlp(), ranks, UNITS, use_orig_params=use_orig_params, ignored=("4",))
        own = [p for name, p in model.named_parameters() if not name.startswith("4.")]
        optimizer = adam(own)
        step(model, optimizer, made_up_gradients(mlp(), 0))
        saved = optimizer_state_dict(model, optimizer)
        of_all = adam(model.parameters())
        loaded = load_optimizer_state(model, of_all, saved)
        assert len(loaded["param_groups"][0]["params"]) == len(list(model.parameters()))
        assert loaded["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]

    same_on_all(2, rank)
