"""The model that the arguments of `flatparam plan` name, and the program that trains it."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import attrs
import torch
from torch import nn

from flatparam_files.command import ArgumentsError
from flatparam_plan.command.functions import function_named, function_with
from flatparam_plan.command.transformers import model_of_class, model_of_config, stored_dtype
from flatparam_plan.training import TrainingProgram

__all__ = ["program_of"]

_NOT_AS_STORED: Final = (
    "planned with parameters and optimizer's states in float32, which one trains, and not in {dtype} as in {path}; "
    "--arg dtype={dtype} plans that"
)


def program_of(chosen: argparse.Namespace) -> TrainingProgram:
    """The program that the arguments name."""
    sys.path.insert(0, os.getcwd())
    arguments = dict(chosen.arg)
    build = functools.partial(_on(chosen.on_cpu), _telling(chosen.model, _maker(chosen.model, arguments)))
    inputs = None if chosen.inputs is None else function_named(chosen.inputs)
    program = TrainingProgram.of(build, inputs, batch=chosen.batch, sequence=chosen.sequence)
    dtype = stored_dtype(chosen.model, arguments) if chosen.model.endswith(".json") else None
    notes = () if dtype is None else (_NOT_AS_STORED.format(dtype=dtype, path=chosen.model),)
    return attrs.evolve(program, keeps_cache=bool(arguments.get("use_cache")), notes=notes)


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
        return model_of_config(model, arguments)
    if ":" in model:
        return function_with(model, arguments)
    return model_of_class(model, arguments)
