"""What a program does to an optimizer and its model between two flat steps."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from flatparam_optim import tensors_stepped
from flatparam_runtime import summon_full_params

from .stepping import assert_clean, assert_same_training, inputs, pair, trained


def frozen_then_not(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    model[2].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    trained(model, optimizer, 2)
    model[2].weight.requires_grad_(True)  # type: ignore[index, union-attr]


def other_learning_rate(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01
        group["betas"] = (0.5, 0.5)


def count_set_back(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    first = next(iter(model.parameters()))
    optimizer.state[first]["step"].zero_()


def count_replaced(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    first = next(iter(model.parameters()))
    optimizer.state[first]["step"] = torch.tensor(1.0)


def state_replaced(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()


def state_moved(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].data = state["exp_avg"].data.clone()


def state_written(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def state_cleared(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    optimizer.state.clear()


def one_state_cleared(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    del optimizer.state[next(iter(model.parameters()))]


def state_added(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    for parameter, state in optimizer.state.items():
        state["mine"] = torch.zeros_like(parameter)


def state_renamed(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    for state in optimizer.state.values():
        state["mine"] = state["exp_avg_sq"]
        state["exp_avg_sq"] = state["mine"].clone()
        state["step"] = state.pop("step")


def loaded(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def loaded_itself(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def from_a_file(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))


def regrouped(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    moved = optimizer.param_groups[0]["params"].pop(0)
    optimizer.add_param_group({"params": [moved], "weight_decay": 0.5})


def values_written(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    with summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def closure(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        before = float(model(x).square().mean())
    assert float(optimizer.step(evaluate)) == before


def no_gradient_at_all(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    optimizer.step()


def tensor_learning_rate(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.05)
    trained(model, optimizer, 2)
    for group, rate in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = rate


Events: Any = [
    # The weight itself, and those before and behind it, are three; the biases are one.
    (frozen_then_not, 4),
    (other_learning_rate, 2),
    (count_set_back, 3),
    (count_replaced, 3),
    (state_replaced, 2),
    (state_moved, 2),
    (state_written, 2),
    (state_cleared, 2),
    (one_state_cleared, 3),
    (state_added, 2),
    (state_renamed, 2),
    (loaded, 2),
    (loaded_itself, 2),
    (from_a_file, 2),
    (regrouped, 3),
    (values_written, 2),
    (closure, 2),
    (no_gradient_at_all, 2),
    (tensor_learning_rate, 2),
]


@pytest.mark.parametrize(("event", "count"), Events, ids=lambda value: getattr(value, "__name__", ""))
def test_whatever_happens_between_steps(event: Any, count: int) -> None:
    """The plain optimizer's numbers, and as few tensors as there are stretches of parameters with equal state."""
    model, optimizer, plain, expected = pair()
    x = inputs(0)[0]
    for each, stepper in ((model, optimizer), (plain, expected)):
        trained(each, stepper, 2)
        event(each, stepper, x)
        trained(each, stepper, 3)
        assert_clean(stepper)
    assert_same_training(model, optimizer, plain, expected)
    assert tensors_stepped(optimizer) == count
