"""The model that the arguments of `flatparam plan` name, and the program that trains it."""

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
from typing import Any

import torch
from torch import nn

from flatparam.command.opening import ArgumentsError
from flatparam.planning.program import TrainingProgram

__all__ = ["program_of"]


def program_of(chosen: argparse.Namespace) -> TrainingProgram:
    """The program that the arguments name."""
    sys.path.insert(0, os.getcwd())
    build = functools.partial(
        _on(chosen.on_cpu), _telling(chosen.model, _maker(chosen.model, dict(chosen.arg)))
    )
    inputs = None if chosen.inputs is None else _function(chosen.inputs)
    return TrainingProgram.of(build, inputs, batch=chosen.batch, sequence=chosen.sequence)


def _on(cpu: bool) -> Callable[[Callable[[], nn.Module]], nn.Module]:
    def make(function: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("cpu" if cpu else "meta"):
            return function()

    return make


def _telling(model: str, function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The function, whose errors say which model could not be made."""

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
    """The function that makes the model."""
    if model.endswith(".json"):
        try:
            read = json.loads(Path(model).read_text(encoding="utf-8"))
        except OSError as error:
            raise ArgumentsError(
                f"expected a config.json that can be read, found {model!r}: {error.strerror}; give the path of the file"
            ) from error
        except ValueError as error:
            raise ArgumentsError(
                f"expected a config.json, found {model!r}, which is not JSON: {error}"
            ) from error
        if not isinstance(read, dict) or "model_type" not in read:
            raise ArgumentsError(
                f"expected a config.json of transformers, with model_type, found {model!r} without one; give "
                "MODULE:FUNCTION, a function that makes the model"
            )
        kind = read.pop("model_type")
        return _of_transformers(kind, {**read, **arguments}, is_class=False)
    if ":" in model:
        make = _function(model)
        try:
            inspect.signature(make).bind(**arguments)
        except TypeError as error:
            raise ArgumentsError(
                f"expected --arg for each argument that {model} needs, and for no others, found something else: {error}"
            ) from error
        return functools.partial(make, **arguments)
    return _of_transformers(model, arguments, is_class=True)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ArgumentsError(
            f"expected MODULE:FUNCTION that can be imported, found {name!r}: {error}"
        ) from error
    return found


def _of_transformers(name: str, arguments: dict[str, Any], *, is_class: bool) -> Callable[[], nn.Module]:
    """The function that makes a causal language model, or else any model, of a configuration of transformers."""
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
