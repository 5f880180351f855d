"""Optimizers step long parameters in pieces, flat ones and originals, and nobody can tell but by time and memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from flatparam_comm import Collectives
from flatparam_optim import set_flat_steps, tensors_stepped
from flatparam_optim.segments.step_segment import STEP_NUMEL, THREAD_GRAIN, can_be_divided

from .beneath import check_same, full_parameters, run, seeded
from .stepping import (
    HERE,
    KINDS,
    STEPS,
    assert_same_values,
    inputs,
    net,
    sharded_net,
    train,
    train_on_mean,
    values_of,
)

NUMEL = 8


@pytest.fixture(autouse=True)
def short_pieces() -> Iterator[None]:
    """Have pieces of 8 elements."""
    with STEP_NUMEL.set_to(NUMEL), THREAD_GRAIN.set_to(0):
        yield


def flat_net(ranks: Collectives = HERE, original: bool = False) -> nn.Module:
    return sharded_net(ranks, original=original)


def momentum(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def pieces_of(model: nn.Module) -> int:
    """How many tensors are stepped when every parameter that is longer is cut, and none is joined."""
    return sum(-(-p.numel() // NUMEL) if p.numel() > NUMEL else 1 for p in model.parameters())


@pytest.mark.parametrize(("kind", "how"), KINDS)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_every_optimizer_has_the_bits_of_the_plain_one(kind: Any, how: dict[str, Any], original: bool) -> None:
    """Two ranks, several steps: the parameters are those of the plain model on the mean of the losses."""

    cuts = not how.get("fused") and not how.get("foreach")
    if kind is optim.SGD and "momentum" not in how:
        # Nothing is kept from step to step.
        cuts = False

    def rank(ranks: Collectives) -> Any:
        model = flat_net(ranks, original)
        optimizer = kind(model.parameters(), **how)
        train(model, optimizer, inputs(ranks.rank, STEPS))
        long = [p for p in model.parameters() if p.numel() > NUMEL]
        assert all(can_be_divided(p, optimizer.state) for p in long) or not cuts
        short = any(0 < p.numel() <= NUMEL for p in model.parameters())
        return (
            full_parameters(model),
            tensors_stepped(optimizer),
            sum(-(-p.numel() // NUMEL) for p in long),
            short,
        )

    plain = seeded(net)
    train_on_mean(plain, kind(plain.parameters(), **how), 2, steps=STEPS)
    for state, count, pieces, short in run(2, rank):
        check_same(state, values_of(plain))
        assert pieces > 1
        if not original:
            assert count == (pieces if cuts else 1)
        elif cuts:
            assert count > pieces if short else count == pieces


def test_state_is_the_optimizers_own() -> None:
    """Whole tensors in their shapes, the same objects in each step, and one count of steps for all pieces."""
    model = flat_net()
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, inputs(0, 1))
    (flat,) = model.parameters()
    before = dict(optimizer.state[flat])
    train(model, optimizer, inputs(0, 4))
    assert tensors_stepped(optimizer) == pieces_of(model) > 1
    assert [*optimizer.state] == [flat]
    assert optimizer.state[flat].keys() == before.keys()
    assert all(value is before[name] for name, value in optimizer.state[flat].items())
    assert float(before["step"]) == 5
    assert before["exp_avg"].shape == flat.shape


def test_saved_and_loaded_between() -> None:
    """A state dict of an optimizer that has stepped pieces goes on in another one in the same bits."""
    models = [flat_net(), flat_net()]
    optimizers = [optim.AdamW(model.parameters(), lr=0.1) for model in models]
    first, second = inputs(0, 2), inputs(1, 3)
    train(models[0], optimizers[0], first)
    with torch.no_grad():
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            mine.copy_(theirs)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, second)
        assert tensors_stepped(optimizer) == pieces_of(model)
    assert_same_values(models[1], models[0])


@pytest.mark.parametrize("what", ["tensor lr", "sparse", "turned off", "state of another kind"])
def test_what_cannot_be_cut_is_stepped_whole(what: str) -> None:
    """Hyper-parameters that are tensors, gradients and state of other kinds, and by request: torch's own step."""

    def stepped(model: nn.Module) -> int | None:
        rate = torch.tensor(0.1) if what == "tensor lr" else 0.1
        optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=rate, momentum=0.5)
        if what == "turned off":
            set_flat_steps(optimizer, False)
        for x in inputs(0, STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            for parameter in model.parameters():
                if what == "sparse":
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad.to_sparse()
                if what == "state of another kind":
                    optimizer.state[parameter]["note"] = "mine"
            optimizer.step()
        return tensors_stepped(optimizer)

    plain, model = seeded(net), flat_net()
    stepped(plain)
    assert stepped(model) == (None if what == "turned off" else 1)
    assert_same_values(model, plain)


def test_gradients_come_and_go() -> None:
    """A step without a gradient changes nothing, and the next one with a gradient is in pieces again."""
    model, plain = flat_net(), seeded(net)
    pairs = [(model, momentum(model.parameters())), (plain, momentum(plain.parameters()))]
    for x in inputs(0, 4):
        for each, optimizer in pairs:
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
    assert_same_values(model, plain)
    assert tensors_stepped(pairs[0][1]) == 0
    for each, optimizer in pairs:
        train(each, optimizer, inputs(1, 1))
    assert tensors_stepped(pairs[0][1]) == pieces_of(model)


def test_state_that_the_step_makes_is_put_together() -> None:
    """If the optimizer finds some state and makes other in each piece, that is one tensor afterwards."""
    model, plain = flat_net(), seeded(net)
    for each in (model, plain):
        optimizer = momentum(each.parameters())
        train(each, optimizer, inputs(0, 2))
        for state in optimizer.state.values():
            del state["momentum_buffer"]
            state["note"] = torch.zeros(())
        train(each, optimizer, inputs(1, 2))
        for parameter, state in optimizer.state.items():
            assert state["momentum_buffer"].shape == parameter.shape
            assert state.keys() == {"momentum_buffer", "note"}
        assert tensors_stepped(optimizer) == (pieces_of(model) if each is model else None)
    assert_same_values(model, plain)


def test_state_that_was_cleared() -> None:
    """Without its buffer a parameter is stepped whole, which makes the buffer anew, and then in pieces again."""
    model, plain = flat_net(), seeded(net)
    counts = []
    for each in (model, plain):
        optimizer = momentum(each.parameters())
        train(each, optimizer, inputs(0, 2))
        for state in optimizer.state.values():
            state["momentum_buffer"] = None
        for x in inputs(1, 3):
            train(each, optimizer, [x])
            counts.append(tensors_stepped(optimizer))
    assert counts == [1, pieces_of(model), pieces_of(model), None, None, None]
    assert_same_values(model, plain)


def test_a_parameter_that_is_listed_twice() -> None:
    """It is stepped twice, as torch does, which warns of it: not in pieces, of which each would count once."""
    states = []
    for enabled in (True, False):
        model = flat_net()
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = optim.AdamW([*model.parameters()] * 2, lr=0.1)
        set_flat_steps(optimizer, enabled)
        train(model, optimizer, inputs(0, STEPS))
        (state,) = optimizer.state.values()
        assert float(state["step"]) == 2 * STEPS
        states.append(full_parameters(model))
    check_same(*states)


def test_a_step_that_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was raised comes out, and the count of steps is that of the elements that were stepped."""
    model = flat_net()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, inputs(0, 2))
    calls, step = [], torch.Tensor.addcdiv_

    def breaks(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "addcdiv_", breaks)
    (flat,) = model.parameters()
    before = flat.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, inputs(0, 1))
    assert float(optimizer.state[flat]["step"]) == 3
    changed = (flat.detach() != before).nonzero().flatten().tolist()
    assert changed
    assert max(changed) < 2 * NUMEL


def test_optimizers_of_other_models() -> None:
    """Whatever parameters they hold, such as those of a lazy module that was never called, they step as ever."""
    flat_net()
    lazy, linear = nn.LazyLinear(3), nn.Linear(2, 2)
    optimizer = momentum([*lazy.parameters(), *linear.parameters()])
    linear(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert tensors_stepped(optimizer) is None


def test_a_step_is_noticed_by_autograd() -> None:
    """Autograd refuses to differentiate through a flat parameter that pieces of it have changed since."""
    model = flat_net()
    optimizer = momentum(model.parameters())
    train(model, optimizer, inputs(0, 2))
    (flat,) = model.parameters()
    penalty = flat.square().sum()
    optimizer.step()
    assert tensors_stepped(optimizer) == pieces_of(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_other_parameters_are_left_alone() -> None:
    """What belongs to no unit is stepped as it is, however long."""
    model, outside = flat_net(), nn.Parameter(torch.ones(3 * NUMEL))
    optimizer = momentum([*model.parameters(), outside])
    for x in inputs(0, 2):
        optimizer.zero_grad()
        (model(x).square().mean() + outside.sum()).backward()
        optimizer.step()
    assert tensors_stepped(optimizer) == pieces_of(model) + 1
