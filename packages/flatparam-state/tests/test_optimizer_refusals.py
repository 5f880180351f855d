"""What does not fit is refused, with the parameter's name and what to do, and nothing is changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row

from flatparam_comm import Collectives
from flatparam_runtime import FlatParamError
from flatparam_state import load_optimizer_state, optimizer_state_dict

from .models import mlp
from .optimizers import adam, decay_groups
from .worlds import made_up_gradients, named_state, same_on_all, shard, step


def saved(without: tuple[str, ...] = ()) -> Any:
    """The unsharded optimizer's state, by name, after two steps, the first `without` some gradients."""
    model = mlp()
    optimizer = adam(model.parameters())
    step(model, optimizer, made_up_gradients(mlp(), 0, without))
    step(model, optimizer, made_up_gradients(mlp(), 1))
    return named_state(model, optimizer)


def refusal(use_orig_params: bool, state: Any, make: Callable[..., Any] = adam) -> list[str]:
    """What each rank is told when it loads `state`; the optimizer must be as before."""

    def rank(ranks: Collectives) -> str:
        model = shard(mlp(), ranks, ("2", ""), use_orig_params=use_orig_params)
        optimizer = make(model.parameters())
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(FlatParamError) as caught:
            load_optimizer_state(model, optimizer, copy.deepcopy(state))
        assert optimizer.state_dict() == before
        return str(caught.value)

    return same_on_all(2, rank)


def test_a_state_of_the_wrong_shape(use_orig_params: bool) -> None:
    """The error names the state, the parameter and both shapes."""
    state = saved()
    state["state"]["2.weight"]["exp_avg_sq"] = torch.zeros(5, 7)
    for message in refusal(use_orig_params, state):
        assert "'exp_avg_sq'" in message
        assert "'2.weight'" in message
        assert "(7, 5)" in message
        assert "(5, 7)" in message


@each_row("value", [torch.tensor(1.0), 1.0, "text"], ids=["0-d", "float", "string"])
def test_a_value_where_a_tensor_is_expected(use_orig_params: bool, value: Any) -> None:
    """A moment that is no tensor of the parameter's shape is refused by name, whatever it is."""
    state = saved()
    state["state"]["2.weight"]["exp_avg"] = value
    for message in refusal(use_orig_params, state):
        assert "'exp_avg'" in message
        assert "'2.weight'" in message


def test_parameters_that_no_saved_group_holds(use_orig_params: bool) -> None:
    """A model with a parameter that the saved optimizer did not have: the error names it."""
    state = saved()
    state["param_groups"][0]["params"] = [n for n in state["param_groups"][0]["params"] if not n.startswith("2.")]
    for message in refusal(use_orig_params, state):
        assert "'2.weight'" in message


def test_an_optimizer_of_another_model(use_orig_params: bool) -> None:
    """Loading for an optimizer that holds a foreign parameter says which, and what to do, as saving does."""
    for message in refusal(use_orig_params, saved(), lambda p: adam([*p, torch.nn.Parameter(torch.zeros(2, 9))])):
        assert "(2, 9)" in message
        assert "create the optimizer from model.parameters() after sharding" in message


def test_step_counts_that_one_flat_parameter_cannot_have() -> None:
    """Parameters of one flat parameter have one step count: if theirs differ, the error names two, and the remedy."""
    state = saved(without=("4.bias",))
    for message in refusal(False, state):
        assert "'step'" in message
        assert "4.bias" in message
        assert "use_orig_params=True" in message


def test_settings_that_one_flat_parameter_cannot_have() -> None:
    """Parameters of one flat parameter that were saved in groups with different settings are refused by name."""
    model = mlp()
    optimizer = torch.optim.AdamW(decay_groups(model, names=lambda name: name.endswith("weight")))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    step(model, optimizer, made_up_gradients(mlp(), 0))
    for message in refusal(False, named_state(model, optimizer), torch.optim.AdamW):
        assert "weight_decay" in message
        assert "bias" in message


@each_row("state", [{}, None, {"state": {}}], ids=["empty", "none", "no groups"])
def test_something_that_is_no_full_state(use_orig_params: bool, state: Any) -> None:
    """What other ranks than rank 0 get with `rank0_only` cannot be loaded: every rank needs all of it."""
    for message in refusal(use_orig_params, state):
        assert "every rank" in message


@pytest.mark.parametrize("rank0_only", [False, True])
def test_groups_without_a_state(use_orig_params: bool, rank0_only: bool) -> None:
    """What a checkpoint has of plain SGD, groups alone, is the state of an optimizer without any, with its settings."""
    names = list(mlp().state_dict())

    def rank(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        groups = optimizer.state_dict()["param_groups"]
        state = {"param_groups": [{**groups[0], "params": names, "lr": 0.5}]}
        given = {} if rank0_only and ranks.rank else state
        loaded = load_optimizer_state(model, optimizer, given, rank0_only=rank0_only)
        return loaded["state"], loaded["param_groups"][0]["lr"]

    assert same_on_all(2, rank) == [({}, 0.5)] * 2


def test_a_plain_state_dict_by_numbers(use_orig_params: bool) -> None:
    """The state dict of an unsharded optimizer numbers its parameters: the error says that names are expected."""
    model = mlp()
    optimizer = adam(model.parameters())
    step(model, optimizer, made_up_gradients(mlp(), 0))
    for message in refusal(use_orig_params, optimizer.state_dict()):
        assert "name" in message


def test_none_values_of_old_torch_versions_are_loaded(use_orig_params: bool) -> None:
    """SGD without momentum once kept `momentum_buffer: None`; such a state is still taken."""
    state = saved()
    state["state"] = {fqn: {"momentum_buffer": None} for fqn in state["state"]}

    def rank(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.load_state_dict(load_optimizer_state(model, optimizer, state))
        step(model, optimizer, made_up_gradients(mlp(), 1))
        return optimizer_state_dict(model, optimizer)["param_groups"][0]["params"]

    assert same_on_all(2, rank) == [list(mlp().state_dict())] * 2


def test_a_refused_load_is_not_noted() -> None:
    """Ranks that each load a different state, which is refused at its last value, go on as if they had not tried."""

    def rank(ranks: Collectives) -> int:
        model = shard(mlp(), ranks, ("2", ""), use_orig_params=False)
        optimizer = adam(model.parameters())
        state = saved()
        first, *_ = state["state"]
        # Of two parameters in one flat parameter only one can have stepped so often.
        state["state"][first]["step"] = torch.tensor(7.0)
        state["state"]["2.weight"]["exp_avg"].fill_(ranks.rank)
        for steps in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not steps:
                with pytest.raises(FlatParamError, match="can have only one"):
                    load_optimizer_state(model, optimizer, state)
        return steps

    assert same_on_all(2, rank) == [1, 1]
