"""Every call that is written for torch's FSDP1 can be made here."""

import enum
import inspect
import typing
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
from each_row import each_row

import flatparam.wrap
from flatparam import FullyShardedDataParallel

Theirs = torch.distributed.fsdp.FullyShardedDataParallel

METHODS = [
    "__init__",
    "check_is_root",
    "clip_grad_norm_",
    "forward",
    "fsdp_modules",
    "get_state_dict_type",
    "named_buffers",
    "named_parameters",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "set_state_dict_type",
    "state_dict_type",
    "summon_full_params",
    "__getitem__",
    "__getattr__",
]

FUNCTIONS = [
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "_module_wrap_policy",
    "_wrap_module_cls_individually",
    "_or_policy",
    "_recursive_wrap",
    "enable_wrap",
    "wrap",
]


def named_parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each parameter; an enum's member stands for its name and value."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if isinstance(default, enum.Enum):
            default = (type(default).__name__, default.name, default.value)
        found.append((parameter.name, parameter.kind, default))
    return found


def test_constructor() -> None:
    """The same 16 arguments in the same order, by position and by name, with the same defaults; ours follow by name."""
    found = named_parameters_of(FullyShardedDataParallel)
    assert found[:16] == named_parameters_of(Theirs)
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in found[16:])


def test_types_of_the_constructors_arguments() -> None:
    """Each argument has a type, which can be asked for at runtime, and none is `Any`."""
    types = typing.get_type_hints(FullyShardedDataParallel.__init__)
    assert set(types) == {*inspect.signature(FullyShardedDataParallel).parameters, "return"}
    assert Any not in types.values()


def test_the_class_has_no_base_of_ours() -> None:
    """The wrapper is a module and nothing else: `isinstance` tells of no helper class."""
    assert FullyShardedDataParallel.__mro__ == (FullyShardedDataParallel, torch.nn.Module, object)


@each_row("name", METHODS)
def test_methods(name: str) -> None:
    """Names, order, kinds and defaults of a method's parameters are torch's; what is ours alone follows by name."""
    theirs = named_parameters_of(getattr(Theirs, name))
    ours = [
        p
        for p in named_parameters_of(getattr(FullyShardedDataParallel, name))
        if p[1] is not inspect.Parameter.KEYWORD_ONLY
    ]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(kind in variadic for _, kind, _ in theirs):
        theirs = named_parameters_of(getattr(torch.nn.Module, name)) if name.startswith("named_") else theirs
    assert [p[:1] + p[2:] for p in ours] == [p[:1] + p[2:] for p in theirs] or name == "__getitem__"
    assert len(ours) == len(theirs)


@each_row(
    "name",
    [
        "fsdp_modules",
        "set_state_dict_type",
        "get_state_dict_type",
        "state_dict_type",
        "summon_full_params",
        "optim_state_dict",
        "optim_state_dict_to_load",
    ],
)
def test_static_methods(name: str) -> None:
    """They are called on the class with a module, wherever torch's are."""
    assert isinstance(inspect.getattr_static(Theirs, name), staticmethod)
    assert isinstance(inspect.getattr_static(FullyShardedDataParallel, name), staticmethod)


@each_row("name", FUNCTIONS)
def test_wrapping_functions(name: str) -> None:
    """The policies and helpers take what torch's take."""
    assert named_parameters_of(getattr(flatparam.wrap, name)) == named_parameters_of(
        getattr(torch.distributed.fsdp.wrap, name)
    )


@each_row("name", ["ModuleWrapPolicy", "CustomPolicy"])
def test_policy_classes(name: str) -> None:
    """The policy classes are built from the same arguments."""
    assert named_parameters_of(getattr(flatparam.wrap, name)) == named_parameters_of(
        getattr(torch.distributed.fsdp.wrap, name)
    )
