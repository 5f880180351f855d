"""The model that the arguments of `flatparam plan` name, and the program that trains it."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flatparam.command.opening import ArgumentsError
from flatparam.command.plan.functions import function_named, function_with
from flatparam.command.plan.transformers import model_of_class, model_of_config
from flatparam.planning.training import TrainingProgram

__all__ = ["program_of"]


def program_of(chosen: argparse.Namespace) -> TrainingProgram:
    """The program that the arguments name."""
    sys.path.insert(0, os.getcwd())
    build = functools.partial(
        _on(chosen.on_cpu), _telling(chosen.model, _maker(chosen.model, dict(chosen.arg)))
    )
    inputs = None if chosen.inputs is None else function_named(chosen.inputs)
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
        return model_of_config(model, arguments)
    if ":" in model:
        return function_with(model, arguments)
    return model_of_class(model, arguments)
