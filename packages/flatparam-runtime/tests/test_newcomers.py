"""Modules that come into a unit after it was sharded are noticed before the first pass."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import Collectives, Topology
from flatparam_runtime import UnitPlan, notice_optimizers, shard_module

from .models import WIDTH, Stack, batch
from .worlds import run, seeded, sharded

BLOCKS = ["blocks.0", "blocks.1"]


def replace_head(stack: Stack) -> None:
    stack.head = nn.Linear(WIDTH, 3)


def replace_unit(stack: Stack) -> None:
    stack.blocks[1] = nn.Linear(WIDTH, WIDTH)


def add_bias(stack: Stack) -> None:
    stack.stem.register_parameter("scale", nn.Parameter(stack.stem.bias.new_ones(1)))


def replace_with_frozen(stack: Stack) -> None:
    stack.blocks[1] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def replace_with_unit(stack: Stack) -> None:
    stack.blocks[1] = nn.Linear(WIDTH, WIDTH)
    shard_module(stack.blocks[1], stack.__dict__["plan"])


def nothing(_: Stack) -> None:
    pass


def warned(
    change: Callable[[Stack], None], use_orig_params: bool, *, copied: bool = False, late: bool = False
) -> list[str]:
    """The warnings on two ranks of a stack that is changed after it was sharded, and then makes two steps.

    If `late`, it has made one before.
    """

    notice_optimizers()

    def train(collectives: Collectives) -> None:
        stack = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        stack.__dict__["plan"] = UnitPlan(Topology(collectives), use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(stack.parameters(), 0.1)
        if late:
            stack(batch()).sum().backward()
            optimizer.step()
        change(stack)
        if copied:
            del stack.__dict__["plan"]
            stack = copy.deepcopy(stack)
        optimizer = torch.optim.SGD(stack.parameters(), 0.1)
        for _ in range(3):
            stack(batch()).sum().backward()
            optimizer.step()
        stack(batch())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(2, train)
    return [text for warning in caught if "no unit holds" in (text := str(warning.message))]


@each_row(
    ("change", "unit", "names"),
    [
        (replace_head, "(root)", "'head.weight' .. 'head.bias' (2 parameters)"),
        (replace_unit, "(root)", "'blocks.1.weight' .. 'blocks.1.bias' (2 parameters)"),
        (add_bias, "(root)", "'stem.scale'"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["before the first pass", "after a step"])
def test_newcomers_are_named(
    change: Callable[[Stack], None], unit: str, names: str, late: bool, use_orig_params: bool
) -> None:
    """Each rank warns once of parameters that came in after the module was sharded, and says what to do."""
    messages = warned(change, use_orig_params, late=late)
    assert len(messages) == 2
    for message in messages:
        assert f"unit {unit!r}: no unit holds {names}, which came into the module after it was sharded" in message
        assert "replace or add modules before the model is sharded" in message


@each_row("change", [replace_with_frozen, replace_with_unit, nothing])
def test_what_is_frozen_or_sharded_is_no_newcomer(change: Callable[[Stack], None], use_orig_params: bool) -> None:
    """A new module that is a unit, or whose parameters are frozen, gets no warning."""
    assert warned(change, use_orig_params) == []
    assert warned(change, use_orig_params, late=True) == []


def test_a_copy_does_not_know(use_orig_params: bool) -> None:
    """A copy of a sharded module has the same parameters, and gets no warning."""
    assert warned(nothing, use_orig_params, copied=True) == []


def test_what_is_ignored_is_no_newcomer(use_orig_params: bool) -> None:
    """Parameters that were ignored when the module was sharded get no warning, even if they are other objects now."""

    def train(collectives: Collectives) -> None:
        stack = seeded(Stack)
        plan = UnitPlan(Topology(collectives), use_orig_params=use_orig_params)
        shard_module(stack, plan, ignored_modules=[stack.head])
        stack.head = nn.Linear(WIDTH, 3)
        stack(batch()).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(2, train)
