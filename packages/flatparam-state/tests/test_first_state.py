"""The state of an optimizer that has not stepped, made so that programs can load into it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from flatparam_state import (
    FormKind,
    StateForm,
    load_model_state,
    load_optimizer_state,
    model_state_dict,
    optimizer_state_dict,
)
from flatparam_state.optimizer.first_state import FirstState

from .optimizers import OPTIMIZERS, Keeper, adam
from .worlds import same_on_all, shard

MORE = {
    **OPTIMIZERS,
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "Adam with a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
}
SHARDED = StateForm(FormKind.SHARDED)


class Lookback(torch.optim.Optimizer):
    """An optimizer that torch does not know: it averages parameters, and counts in an `int`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "weight_decay": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own = self.state[parameter]
                if not own:
                    own |= {"step": 0, "mean": parameter.clone(), "moment": torch.zeros_like(parameter)}
                own["step"] += 1
                own["moment"].add_(parameter.grad + group["weight_decay"] * parameter)
                parameter.sub_(group["lr"] * own["moment"] / own["step"])
                own["mean"].lerp_(parameter, 0.5)


class Passing(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate's is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state: Any = property(lambda self: self.optimizer.state)
    param_groups: Any = property(lambda self: self.optimizer.param_groups)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()


def build() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Linear(3, 2))
    model[2].weight.requires_grad_(False)
    return model


def sharded(ranks: Collectives, originals: bool) -> nn.Module:
    # The parameters of one flat parameter are all trained, or none.
    return shard(build(), ranks, ("0", "2", "3"), use_orig_params=originals)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        model(torch.full((2, 3), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [*MORE, "Lookback"])
def test_it_is_what_the_first_step_starts_from(kind: str, use_orig_params: bool) -> None:
    """It has the states that steps leave, with their shapes and dtypes; who starts with it trains as who starts without."""
    make: Any = Lookback if kind == "Lookback" else MORE[kind]

    def rank(ranks: Collectives) -> None:
        model, again = sharded(ranks, use_orig_params), sharded(ranks, use_orig_params)
        optimizer, other = make(model.parameters()), make(again.parameters())
        first = optimizer_state_dict(again, other, first_state=True)
        other.load_state_dict(load_optimizer_state(again, other, first))
        for each, stepped in ((model, optimizer), (again, other)):
            trained(each, stepped, ranks.rank)
        facts = [
            {
                (fqn, name): (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)
                for fqn, values in state["state"].items()
                for name, value in values.items()
            }
            for state in (first, optimizer_state_dict(model, optimizer))
        ]
        assert facts[0] == facts[1]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    same_on_all(2, rank)


def entries(ranks: Collectives, originals: bool) -> None:
    model = sharded(ranks, originals)
    for form in (StateForm(), SHARDED) if ranks.size == 2 else (StateForm(),):
        state = optimizer_state_dict(model, adam(model.parameters()), form=form, first_state=True)
        assert set(state["state"]) == {"0.weight", "0.bias", "3.weight", "3.bias"}
        for entry in state["state"].values():
            assert type(entry) is FirstState
            assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
            assert entry["step"] == 0


def test_of_each_parameter(use_orig_params: bool) -> None:
    """Parameters that require a gradient have an entry, a `FirstState`; others have none."""
    same_on_all(3, entries, use_orig_params)


@pytest.mark.processes
def test_of_the_sharded_form(use_orig_params: bool) -> None:
    """The sharded form has the same."""
    run_processes(2, entries, use_orig_params)


def test_nothing_changes(use_orig_params: bool) -> None:
    """Parameters, gradients, settings, hooks, a scheduler and the random numbers do not notice."""

    def rank(ranks: Collectives) -> None:
        model = sharded(ranks, use_orig_params)
        for make in (adam, OPTIMIZERS["SGD momentum"], Lookback):
            optimizer = make(model.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            seen: list[Any] = []

            def note(*_: Any, seen: list[Any] = seen) -> None:
                seen.append("stepped")

            optimizer.register_step_pre_hook(note)
            optimizer.register_step_post_hook(note)
            model(torch.ones(2, 3)).sum().backward()
            before = [(p.detach().clone(), p.grad) for p in model.parameters()]
            versions = [p._version for p in model.parameters()]
            groups, random = copy.deepcopy(optimizer.state_dict()["param_groups"]), torch.get_rng_state()
            own = dict(vars(optimizer))
            optimizer_state_dict(model, optimizer, first_state=True)
            assert not optimizer.state
            assert seen == []
            assert vars(optimizer) == own
            assert optimizer.state_dict()["param_groups"] == groups
            assert torch.equal(random, torch.get_rng_state())
            assert [p._version for p in model.parameters()] == versions
            for parameter, (value, gradient) in zip(model.parameters(), before, strict=True):
                assert parameter.grad is gradient
                assert torch.equal(parameter, value)
            assert scheduler.last_epoch == 0

    same_on_all(2, rank)


def test_settings_of_groups() -> None:
    """Each parameter has what its own group's settings ask for, also through an optimizer around the other."""

    def rank(ranks: Collectives) -> None:
        model = sharded(ranks, True)
        groups = [
            {"params": list(model[0].parameters()), "amsgrad": True},
            {"params": list(model[3].parameters())},
        ]
        state = optimizer_state_dict(model, Passing(torch.optim.Adam(groups)), first_state=True)["state"]
        assert "max_exp_avg_sq" in state["0.weight"]
        assert "max_exp_avg_sq" not in state["3.weight"]

    same_on_all(2, rank)


def test_only_what_no_rank_has_stepped() -> None:
    """If a rank has a state of a parameter, or a state is passed, what there is remains as it is; the others get theirs."""

    def rank(ranks: Collectives) -> None:
        model = sharded(ranks, True)
        optimizer = adam(model.parameters())
        passed = optimizer_state_dict(model, optimizer, state_dict=optimizer.state_dict(), first_state=True)
        assert passed["state"] == {}
        model(torch.ones(2, 3)).sum().backward()
        # The second rank has elements of only some parameters.
        for parameter in model[3].parameters():
            parameter.grad = None
        stepped = [parameter.numel() for parameter in model[0].parameters()]
        optimizer.step()
        plain = optimizer_state_dict(model, optimizer)["state"]
        assert set(plain) == {"0.weight", "0.bias"}, stepped
        state = optimizer_state_dict(model, optimizer, first_state=True)["state"]
        assert set(state) == {"0.weight", "0.bias", "3.weight", "3.bias"}, stepped
        for fqn, entry in state.items():
            assert type(entry) is (dict if fqn in plain else FirstState)
            assert entry["step"] == (1 if fqn in plain else 0)

    same_on_all(2, rank)


@pytest.mark.parametrize("kind", [*MORE, "Lookback"])
def test_a_trained_parameter_without_gradients(kind: str, use_orig_params: bool) -> None:
    """A parameter that no step gave a gradient has the state of its first step beside those of others, which are theirs.

    Who loads it goes on as who has saved it, also if the parameter gets gradients then. What is frozen has none.
    """
    make: Any = Lookback if kind == "Lookback" else MORE[kind]

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, all_of_it: bool) -> None:
        for step in range(number):
            model(torch.full((2, 3), step + 1.0)).square().mean().backward()
            if not all_of_it:
                for parameter in model[3].parameters():
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()

    def rank(ranks: Collectives) -> None:
        model, again = sharded(ranks, use_orig_params), sharded(ranks, use_orig_params)
        optimizer, other = make(model.parameters()), make(again.parameters())
        steps(model, optimizer, 2, all_of_it=False)
        before = optimizer_state_dict(model, optimizer)["state"]
        state = optimizer_state_dict(model, optimizer, first_state=True)
        unstepped = set(state["state"]) - set(before)
        assert unstepped <= {"3.weight", "3.bias"}
        # Adagrad has states from its beginning.
        assert set(state["state"]) == set(optimizer_state_dict(again, other, first_state=True)["state"])
        assert all(type(state["state"][fqn]) is FirstState for fqn in unstepped)
        load_model_state(again, model_state_dict(model))
        other.load_state_dict(load_optimizer_state(again, other, state))
        for each, stepping in ((model, optimizer), (again, other)):
            steps(each, stepping, 2, all_of_it=True)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    same_on_all(2, rank)


def test_an_optimizer_that_cannot_say() -> None:
    """If the state cannot be made, on one rank only, there is none on any; a warning says so, and nothing is refused."""

    class Fails(Lookback):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if ranks_that_fail:
                raise RuntimeError("not now")
            super().step()

    ranks_that_fail: list[int] = [1]

    def rank(ranks: Collectives) -> None:
        model = sharded(ranks, True)
        optimizer = (Fails if ranks.rank in ranks_that_fail else Lookback)(model.parameters())
        state = optimizer_state_dict(model, optimizer, first_state=True)
        assert state["state"] == {}

    with pytest.warns(UserWarning, match=r"Fails has no state yet.*not now"):
        same_on_all(2, rank)


def test_states_of_any_kind() -> None:
    """States that are no tensors are there, too."""

    def rank(ranks: Collectives) -> None:
        model = sharded(ranks, True)
        state = optimizer_state_dict(model, Keeper(model.parameters()), first_state=True)
        assert state["state"]["0.weight"]["history"] == [0.5, 0.25]

    same_on_all(2, rank)
