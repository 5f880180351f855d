"""The model that the arguments of `flatparam plan` name: from a function, or from a configuration of transformers."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import nn

from flatparam_files.command import ArgumentsError
from flatparam_plan.training import TrainingProgram

__all__ = ["program_of"]

_NOT_AS_STORED: Final = (
    "planned with parameters and optimizer's states in float32, which one trains, and not in {dtype} as in {path}; "
    "--arg dtype={dtype} plans that"
)


def program_of(chosen: argparse.Namespace) -> TrainingProgram:
    """Return the program that the arguments name."""
    sys.path.insert(0, os.getcwd())
    arguments = dict(chosen.arg)
    build = functools.partial(_on(chosen.on_cpu), _telling(chosen.model, _maker(chosen.model, arguments)))
    inputs = None if chosen.inputs is None else _function_named(chosen.inputs)
    program = TrainingProgram.of(build, inputs, batch=chosen.batch, sequence=chosen.sequence)
    dtype = _stored_dtype(chosen.model, arguments) if chosen.model.endswith(".json") else None
    notes = () if dtype is None else (_NOT_AS_STORED.format(dtype=dtype, path=chosen.model),)
    return attrs.evolve(program, keeps_cache=bool(arguments.get("use_cache")), notes=notes)


def _on(cpu: bool) -> Callable[[Callable[[], nn.Module]], nn.Module]:
    def make(function: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("cpu" if cpu else "meta"):
            return function()

    return make


def _telling(model: str, function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return the function, whose errors say which model could not be made."""

    def make() -> nn.Module:
        try:
            made = function()
        except Exception as error:
            raise ArgumentsError(
                f"expected {model} to make a model of these arguments, found that it raises {type(error).__name__}: "
                f"{error}"
            ) from error
        if not isinstance(made, nn.Module):
            raise ArgumentsError(f"expected {model} to make a torch.nn.Module, found {type(made).__name__}")
        return made

    return make


def _maker(model: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return the function that makes the model."""
    if model.endswith(".json"):
        return _model_of_config(model, arguments)
    if ":" in model:
        return _function_with(model, arguments)
    return _model_of_class(model, arguments)


# Models of the library transformers, made of a configuration


_DTYPES: Final = ("dtype", "torch_dtype")
"""The keys of a configuration under which the dtype of its parameters is, in files of later and earlier versions."""


def _model_of_config(path: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return the function that makes a model of a `config.json`, with `arguments` in place of what it says.

    Parameters are float32, whatever the dtype of the files that the configuration came with, unless `arguments` have a
    `dtype`: training keeps a master copy in float32, and computes in the dtype of mixed precision.

    Raises:
        ArgumentsError: if the file is none, or transformers does not know the model.
    """
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentsError(
            f"expected a config.json that can be read, found {path!r}: {error.strerror}; give the path of the file"
        ) from error
    except ValueError as error:
        raise ArgumentsError(f"expected a config.json, found {path!r}, which is not JSON: {error}") from error
    if not isinstance(read, dict) or "model_type" not in read:
        raise ArgumentsError(
            f"expected a config.json of transformers, with model_type, found {path!r} without one; give "
            "MODULE:FUNCTION, a function that makes the model"
        )
    kind = read.pop("model_type")
    return _of_transformers(kind, {**_without_dtypes(read), **arguments}, is_class=False)


def _stored_dtype(path: str, arguments: dict[str, Any]) -> str | None:
    """The dtype that a `config.json` gives parameters, if that is not float32 and `arguments` do not ask for any."""
    if any(name in arguments for name in _DTYPES):
        return None
    found = _dtypes_in(json.loads(Path(path).read_text(encoding="utf-8"))) - {"float32"}
    return min(found, default=None)


def _dtypes_in(read: Any) -> set[str]:
    if not isinstance(read, dict):
        return set()
    own = {str(read[name]) for name in _DTYPES if read.get(name)}
    return own.union(*map(_dtypes_in, read.values()))


def _without_dtypes(read: Any) -> Any:
    """Return the configuration, and those in it, without the dtype of the files that it came with."""
    if not isinstance(read, dict):
        return read
    return {name: _without_dtypes(value) for name, value in read.items() if name not in _DTYPES}


def _model_of_class(name: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return the function that makes a model of a class of configurations, such as LlamaConfig, and its arguments.

    Raises:
        ArgumentsError: if transformers has no such class.
    """
    return _of_transformers(name, arguments, is_class=True)


def _of_transformers(name: str, arguments: dict[str, Any], *, is_class: bool) -> Callable[[], nn.Module]:
    """Return the function that makes a causal language model, or else any model, of a configuration of transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise ArgumentsError(
            f"expected transformers to be installed, to make a model of {name!r}; install it, or give "
            "MODULE:FUNCTION, a function that makes the model"
        )
    transformers = importlib.import_module("transformers")
    if is_class:
        if not hasattr(transformers, name):
            raise ArgumentsError(
                f"expected a config class of transformers such as LlamaConfig, found {name!r}"
            )
        config = getattr(transformers, name)(**arguments)
    else:
        try:
            config = transformers.AutoConfig.for_model(name, **arguments)
        except ValueError as error:
            raise ArgumentsError(
                f"expected a model_type that transformers has, found {name!r}: {error}"
            ) from error

    def make() -> nn.Module:
        try:
            made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            made = transformers.AutoModel.from_config(config)
        return made

    return make


# Functions that the arguments of `flatparam plan` name as `MODULE:FUNCTION`


def _function_named(name: str) -> Callable[..., Any]:
    """Return the function of this name; its module is imported.

    Raises:
        ArgumentsError: if it cannot be.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentsError(
            f"expected MODULE:FUNCTION that can be imported, found {name!r}: {error}"
        ) from error
    return found


def _function_with(name: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """Return the function of this name, to be called with `arguments`.

    Raises:
        ArgumentsError: if it does not take them, or cannot be imported.
    """
    make = _function_named(name)
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ArgumentsError(
            f"expected --arg for each argument that {name} needs, and for no others, found something else: {error}"
        ) from error
    return functools.partial(make, **arguments)
