"""What else a module registers beside its sharded parameters stays, whenever it came or went."""

from __future__ import annotations

import copy

import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatParamHandle

from .ranks import flatten_alone, gather

CHANGES = ("bias is given", "bias is taken", "one more", "one less", "another name")


def change(module: nn.Module, how: str, value: nn.Parameter) -> None:
    """Register something else in a module, or remove it."""
    if how == "bias is given":
        module.bias = value
    elif how == "bias is taken":
        module.bias = None
    elif how == "one more":
        module.register_parameter("more", value)
    else:
        del module.bias
        if how == "another name":
            module.register_parameter("more", value)


def others(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """What a module registers beside its weight."""
    return {name: each for name, each in module._parameters.items() if name not in ("weight", "_flat_param")}


def turn(handle: FlatParamHandle, *, full: bool) -> None:
    """Gather the full parameters, or free them."""
    if full:
        gather([handle])
    else:
        handle.reshard()


@each_row("use_orig_params", [True, False])
@each_row("while_full", [True, False], ids=["full", "sharded"])
@each_row("passes", [0, 2])
@each_row("how", CHANGES)
def test_what_else_is_registered_stays(how: str, passes: int, while_full: bool, use_orig_params: bool) -> None:
    """A parameter that joins or leaves a module between two gathers, or inside, is there, or not, ever after."""
    inner = nn.Linear(2, 2, bias=False)
    module = nn.Sequential(inner, nn.Linear(2, 2))
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    for _ in range(passes):
        turn(handle, full=True)
        turn(handle, full=False)
    if while_full:
        turn(handle, full=True)
    value = nn.Parameter(torch.ones(2), requires_grad=False)
    change(inner, how, value)
    expected = others(inner)
    full = while_full
    for _ in range(4):
        full = not full
        turn(handle, full=full)
        found = others(inner)
        assert found.keys() == expected.keys()
        assert all(found[name] is expected[name] for name in expected)
        if full:
            assert inner.weight.shape == (2, 2)


@each_row("use_orig_params", [True, False])
def test_a_dictionary_that_somebody_keeps_has_what_is_registered(use_orig_params: bool) -> None:
    """A module's `_parameters` that was kept while they were full, as by a shallow copy, has no freed parameter later."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    for _ in range(3):
        turn(handle, full=True)
        copied = copy.copy(module[0])
        assert copied.weight is module[0].weight
        turn(handle, full=False)
        assert copied._parameters["weight"] is dict.get(module[0]._parameters, "weight")
        assert copied._parameters["weight"] is not handle.leaves[0]
