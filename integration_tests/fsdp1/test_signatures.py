"""Every public name of FSDP1 is here, is called in the same way, and is documented to be what it is there."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.fsdp
from each_row import each_row
from torch import nn

import flatparam
from flatparam.sharded_grad_scaler import ShardedGradScaler
from integration_tests.fsdp1.asking import DIFFERENCES

MODULES = {
    "torch.distributed.fsdp.wrap": "flatparam.wrap",
    "torch.distributed.fsdp.api": "flatparam.api",
    "torch.distributed.fsdp.sharded_grad_scaler": "flatparam.sharded_grad_scaler",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "flatparam",
    "torch.distributed.algorithms._comm_hooks.default_hooks": "flatparam.algorithms._comm_hooks.default_hooks",
}

Theirs = torch.distributed.fsdp.FullyShardedDataParallel
Ours = flatparam.FullyShardedDataParallel


def own_names(kind: type, *without: type) -> Iterator[str]:
    """The public names of a class that none of `without` has in the same form."""
    for name in sorted(dir(kind)):
        theirs = inspect.getattr_static(kind, name)
        inherited = [inspect.getattr_static(base, name, None) for base in without]
        if (not name.startswith("_") or name in ("__init__", "__getitem__", "__getattr__")) and all(
            theirs is not each for each in inherited
        ):
            yield name


def parameters_of(function: Any) -> list[tuple[str, str, Any]]:
    """Name, kind and default of each parameter; an enum's member stands for its name."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if isinstance(default, enum.Enum):
            default = str(default)
        found.append((parameter.name, parameter.kind.name, default))
    return found


def demand_same_call(ours: Any, theirs: Any) -> None:
    """The same names, order, kinds and defaults; what is ours alone can only be passed by name, and need not be."""
    mine, other = parameters_of(ours), parameters_of(theirs)
    assert mine[: len(other)] == other
    for _, kind, default in mine[len(other) :]:
        assert kind == "KEYWORD_ONLY"
        assert default is not inspect.Parameter.empty


@each_row("name", list(own_names(Theirs, nn.Module)))
def test_of_the_wrapper(name: str) -> None:
    """What FSDP1's class defines is defined here, in the same way: static, an attribute, or a method of the same call."""
    getattr(Ours, name)  # what an add-on has comes with the first use
    theirs, ours = inspect.getattr_static(Theirs, name), inspect.getattr_static(Ours, name)
    assert isinstance(ours, staticmethod) == isinstance(theirs, staticmethod)
    assert isinstance(ours, property) == isinstance(theirs, property)
    if isinstance(theirs, property):
        return
    expected = getattr(Theirs, name)
    if name in ("named_parameters", "named_buffers"):  # FSDP1 takes anything, and passes it on to these
        expected = getattr(nn.Module, name)
    if name == "__getitem__":  # called with one key, by position
        assert len(parameters_of(getattr(Ours, name))) == len(parameters_of(expected))
    else:
        demand_same_call(getattr(Ours, name), expected)


@each_row("module", MODULES)
def test_public_names(module: str) -> None:
    """What a module of FSDP1 exports is in the one of the same name here."""
    theirs, ours = importlib.import_module(module), importlib.import_module(MODULES[module])
    names = getattr(theirs, "__all__", None) or [
        name
        for name, value in vars(theirs).items()
        if getattr(value, "__module__", None) == module and not name.startswith("_")
    ]
    assert names
    assert [name for name in names if not hasattr(ours, name)] == []


def functions_and_classes() -> Iterator[tuple[str, str]]:
    """What can be called in those modules."""
    for module in MODULES:
        theirs = importlib.import_module(module)
        for name, value in vars(theirs).items():
            if getattr(value, "__module__", None) == module and callable(value) and not name.startswith("_"):
                yield module, name


@each_row(("module", "name"), list(functions_and_classes()))
def test_calls(module: str, name: str) -> None:
    """Each function and each class of those modules is called in the same way."""
    theirs = getattr(importlib.import_module(module), name)
    ours = getattr(importlib.import_module(MODULES[module]), name)
    assert isinstance(ours, type) == isinstance(theirs, type)
    if isinstance(theirs, type) and issubclass(theirs, enum.Enum):
        assert [(each.name, each.value) for each in ours] == [(each.name, each.value) for each in theirs]
        return
    mine = parameters_of(ours)
    if "dim_0_chunks" in DIFFERENCES.read_text():
        mine = [each for each in mine if each[0] != "dim_0_chunks"]
    theirs_are = parameters_of(theirs)
    assert mine[: len(theirs_are)] == theirs_are


@each_row(
    "name",
    list(own_names(torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, torch.amp.GradScaler)),
)
def test_of_the_scaler(name: str) -> None:
    """What FSDP1's scaler defines beyond torch's own is called in the same way."""
    theirs = getattr(torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, name)
    demand_same_call(getattr(ShardedGradScaler, name), theirs)


@each_row("name", ["ModuleWrapPolicy", "CustomPolicy"])
def test_of_the_policies(name: str) -> None:
    """The policies have the same bases by name, and their methods the same calls."""
    theirs, ours = getattr(torch.distributed.fsdp.wrap, name), getattr(flatparam.wrap, name)
    assert [base.__name__ for base in ours.__mro__] == [base.__name__ for base in theirs.__mro__]
    for method in ("__init__", "_run_policy", "__call__"):
        if method in vars(theirs):
            assert [each[0] for each in parameters_of(getattr(ours, method))] == [
                each[0] for each in parameters_of(getattr(theirs, method))
            ]


def test_documented() -> None:
    """Whatever can be called on the wrapper says what it does."""
    for name in own_names(Ours, nn.Module):
        if name not in ("__init__", "forward"):
            assert inspect.getdoc(inspect.getattr_static(Ours, name)), name
