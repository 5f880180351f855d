"""Optimizers over original parameters step neighbours as one tensor, and nobody can tell but by the time."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn, optim

from flatparam_comm import Collectives
from flatparam_optim import set_flat_steps, tensors_stepped
from flatparam_runtime import unit_of

from .beneath import check_same, full_parameters, run, seeded
from .stepping import (
    KINDS,
    STEPS,
    adamw,
    assert_clean,
    assert_same_training,
    assert_same_values,
    groups,
    inputs,
    net,
    pair,
    sharded_net,
    train,
    train_on_mean,
    trained,
    values_of,
)


@pytest.mark.parametrize(("kind", "how"), KINDS)
@pytest.mark.parametrize("each", [False, True], ids=["whole", "each"])
def test_every_optimizer_has_the_bits_of_the_plain_one(kind: Any, how: dict[str, Any], each: bool) -> None:
    """Two ranks, two groups, several steps: the parameters are those of the plain model on the mean of the losses."""

    def rank(ranks: Collectives) -> Any:
        model = sharded_net(ranks, each=each)
        optimizer = kind(groups(model), **how)
        trained(model, optimizer, seed=ranks.rank)
        assert_clean(optimizer)
        here = [[p for p in group["params"] if p.numel()] for group in optimizer.param_groups]
        wanted = sum(map(len, here)) if how.get("fused") else sum(map(bool, here))
        return full_parameters(model), tensors_stepped(optimizer), wanted

    plain = seeded(net)
    train_on_mean(plain, kind(groups(plain), **how), 2, steps=STEPS)
    for state, count, wanted in run(2, rank):
        check_same(state, values_of(plain))
        assert count is not None
        assert each or count == wanted


@pytest.mark.parametrize("order", ["first", "second"])
def test_clipping_between(order: str) -> None:
    """Gradients clipped in place are still one tensor; clipped by hand into new tensors, they are stepped one by one."""

    def clip(model: nn.Module) -> None:
        if order == "first":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        else:
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 0.5  # type: ignore[operator]

    model, optimizer, plain, expected = pair()
    for x in inputs(0, STEPS):
        for each, stepper in ((model, optimizer), (plain, expected)):
            stepper.zero_grad()
            each(x).square().mean().backward()
            clip(each)
            stepper.step()
    assert_same_training(model, optimizer, plain, expected)
    assert tensors_stepped(optimizer) == (2 if order == "first" else 12)


def test_unsharded_gradients_that_add_up() -> None:
    """Two backward passes for a step, `zero_grad(set_to_none=False)`, and a gradient of zeros are one tensor still."""
    model, optimizer, plain, expected = pair()
    for x in inputs(0, STEPS):
        for each, stepper in ((model, optimizer), (plain, expected)):
            each(x).square().mean().backward()
            each(x + 1).square().mean().backward()
            stepper.step()
            stepper.zero_grad(set_to_none=False)
    assert_same_training(model, optimizer, plain, expected)
    assert tensors_stepped(optimizer) == 2


def test_the_first_step_too() -> None:
    """The state is made as one tensor: no step has to touch each parameter."""
    model = sharded_net()
    optimizer = adamw(model)
    counts = []
    for x in inputs(0, 3):
        train(model, optimizer, [x])
        counts.append(tensors_stepped(optimizer))
    assert counts == [2, 2, 2]
    storages = {optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 2


def test_ranks_without_elements() -> None:
    """A rank steps what it has elements of, and has neither gradient nor state of the rest."""

    def rank(ranks: Collectives) -> Any:
        model = sharded_net(ranks)
        optimizer = adamw(model)
        trained(model, optimizer, seed=ranks.rank)
        assert any(p.numel() == 0 for p in model.parameters())
        for p in model.parameters():
            assert (p.grad is not None) == (p in optimizer.state) == (p.numel() > 0)
        steps = {float(optimizer.state[p]["step"]) for p in model.parameters() if p.numel()}
        here = sum(any(p.numel() for p in group["params"]) for group in optimizer.param_groups)
        return steps, tensors_stepped(optimizer), here

    for steps, count, here in run(3, rank):
        assert steps == {STEPS}
        assert count == here


def test_opting_out() -> None:
    """`set_flat_steps` turns it off and on again between steps; the numbers stay the same."""
    model, optimizer, plain, expected = pair()
    counts = []
    for enabled in (True, False, True):
        set_flat_steps(optimizer, enabled)
        trained(model, optimizer, 2)
        trained(plain, expected, 2)
        counts.append(tensors_stepped(optimizer))
    assert counts == [2, None, 2]
    assert_same_training(model, optimizer, plain, expected)


def test_clean_after_an_exception() -> None:
    """If the step raises, groups and state are those of the parameters; the next step goes on."""
    model = sharded_net()
    optimizer = adamw(model)
    trained(model, optimizer)

    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted)
    assert_clean(optimizer)
    first, second = optimizer.param_groups
    # It raises within the step, behind the first group.
    second["betas"] = None
    before = [float(optimizer.state[p]["step"]) for p in first["params"]]
    with pytest.raises(TypeError):
        optimizer.step()
    assert_clean(optimizer)
    assert [float(optimizer.state[p]["step"]) for p in first["params"]] == [count + 1 for count in before]
    second["betas"] = (0.9, 0.999)
    optimizer.step()
    assert tensors_stepped(optimizer) == 2


def test_step_hooks_see_the_parameters() -> None:
    """Hooks before and after a step are given groups, gradients and state of the original parameters."""
    model = sharded_net()
    optimizer = adamw(model)
    seen: list[int] = []

    def look(stepped: optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert_clean(stepped)
        seen.append(sum(p.grad is not None for group in stepped.param_groups for p in group["params"]))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    trained(model, optimizer, 2)
    assert seen == [12] * 4


def test_a_scheduler_made_before_the_first_step() -> None:
    """Learning rate schedulers wrap `step`; each new rate counts for all parameters."""
    model, optimizer, plain, expected = pair()
    schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, expected)]
    for _ in range(3):
        trained(model, optimizer, 1)
        trained(plain, expected, 1)
        for scheduler in schedulers:
            scheduler.step()
    assert_same_training(model, optimizer, plain, expected)
    assert tensors_stepped(optimizer) == 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_steps(fused: bool) -> None:
    """Scaled gradients are divided before or within the step; an overflow skips it, and no count goes on."""
    model, optimizer, plain, expected = pair(fused=fused)
    for each, stepper in ((model, optimizer), (plain, expected)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for bad in (False, True, False, False):
            stepper.zero_grad()
            scaler.scale(each(inputs(0)[0]).square().mean()).backward()
            if bad:
                next(iter(each.parameters())).grad[0] = float("inf")
            scaler.step(stepper)
            scaler.update()
    assert_same_training(model, optimizer, plain, expected)
    # The CPU's fused kernel rounds a tensor's end otherwise.
    assert tensors_stepped(optimizer) == (12 if fused else 2)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_step_for_themselves(how: str) -> None:
    """A copy of the model and its optimizer trains as the original does, without sharing memory with it."""
    model, optimizer, plain, expected = pair()
    trained(model, optimizer, 2)
    if how == "deepcopy":
        copied, other = copy.deepcopy((model, optimizer))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        copied, other = torch.load(file, weights_only=False)
    trained(copied, other, 1)
    trained(plain, expected, 2)
    trained(model, optimizer, 0)
    before = full_parameters(model)
    trained(copied, other, 0)
    check_same(before, values_of(plain))
    trained(plain, expected, 1)
    assert_same_training(copied, other, plain, expected)
    assert tensors_stepped(other) == 2


def test_several_models_and_plain_parameters_in_one_optimizer() -> None:
    """A parameter of no unit is stepped as it is, beside the segments of each model."""
    models = [sharded_net(), nn.Linear(3, 1), sharded_net()]
    plain = [seeded(net), copy.deepcopy(models[1]), seeded(net)]
    optimizers = [optim.AdamW([p for m in each for p in m.parameters()], lr=0.1) for each in (models, plain)]
    for x in inputs(0, STEPS):
        for each, optimizer in zip((models, plain), optimizers, strict=True):
            optimizer.zero_grad()
            sum(m(x).square().mean() for m in each).backward()
            optimizer.step()
    for mine, theirs in zip(models, plain, strict=True):
        assert_same_values(mine, theirs)
    assert tensors_stepped(optimizers[0]) == 4


def test_several_optimizers_over_one_model() -> None:
    """One for weights, one for biases that steps half as often: each has its own gradients and state."""

    def train_with(model: nn.Module) -> list[optim.Optimizer]:
        weights, biases = groups(model)
        both = [optim.AdamW([weights], lr=0.1), optim.SGD([biases], lr=0.1, momentum=0.5)]
        for number, x in enumerate(inputs(0, 3) * 2):
            model(x).square().mean().backward()
            for optimizer in both[: 1 + number % 2]:
                optimizer.step()
                optimizer.zero_grad()
        return both

    model, plain = sharded_net(), seeded(net)
    mine, _ = train_with(model), train_with(plain)
    assert_same_values(model, plain)
    assert [tensors_stepped(optimizer) for optimizer in mine] == [1, 1]


def test_a_subclass_is_left_alone() -> None:
    """An optimizer that may look at whole parameters, as a subclass may, steps each by itself."""

    class Mine(optim.AdamW):
        """Might do anything."""

    model = sharded_net()
    optimizer = Mine(model.parameters())
    trained(model, optimizer)
    assert tensors_stepped(optimizer) is None


@pytest.mark.parametrize("how", [{"eps": 0.0}, {"lr": float("inf")}, {"betas": (0.9, float("nan"))}], ids=str)
def test_the_padding_stays_zero(how: dict[str, Any]) -> None:
    """If a step would write other numbers than zeros to the padding between parameters, each is stepped by itself."""
    model = sharded_net()
    unit = unit_of(model)
    assert unit is not None
    (handle,) = unit.handles
    gaps, shard = handle.layout.gaps, handle.flat_param
    trained(model, adamw(model), 2)
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group.update(how)
    model(inputs(0)[0]).square().mean().backward()
    optimizer.step()
    assert tensors_stepped(optimizer) == 12
    assert gaps
    assert all(shard.detach()[gap.as_slice()].count_nonzero() == 0 for gap in gaps)


def test_a_parameter_used_outside_notices_the_step() -> None:
    """Autograd refuses to differentiate through a parameter that a step has changed since, as it always does."""
    model = sharded_net()
    optimizer = adamw(model)
    trained(model, optimizer)
    last = list(model.parameters())[-1]
    penalty = last.square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_long_parameters_are_not_joined() -> None:
    """A joined segment has at most 2**18 elements, and what has more is stepped in pieces: a step's temporaries stay small."""

    def wide() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 2), *(nn.Linear(2, 2) for _ in range(2)), nn.Linear(2, 2**17 + 1))

    model = sharded_net(make=wide)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    trained(model, optimizer)
    # They are the small weights, two pieces of the long weight, and all biases.
    assert tensors_stepped(optimizer) == 4


@pytest.mark.parametrize("what", ["bfloat16", "a note", "another shape", "another dtype"])
def test_what_cannot_be_joined_is_stepped_alone(what: str) -> None:
    """Parameters in bfloat16, and state that is no tensor or lies otherwise than the parameter: torch's own step."""
    dtype = torch.bfloat16 if what == "bfloat16" else torch.float32
    model, plain = sharded_net(make=lambda: net().to(dtype)), seeded(net).to(dtype)
    optimizers = [optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (model, plain)]
    odd: dict[str, Any] = {
        "a note": "mine",
        "another shape": torch.zeros(2, 2),
        "another dtype": torch.zeros(1, dtype=torch.int64),
    }
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        for x in inputs(0, 2):
            for parameter in each.parameters():
                if what in odd:
                    optimizer.state[parameter]["odd"] = odd[what]
            train(each, optimizer, [x.to(dtype)])
    assert tensors_stepped(optimizers[0]) == 12
    assert_same_values(model, plain)
