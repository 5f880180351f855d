"""The inputs of a model, and the loss in its output."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flatparam_plan.errors import PlanError

__all__ = ["Inputs", "scalar_of", "tokens_for"]

Inputs: TypeAlias = "tuple[Any, ...] | Mapping[str, Any] | Tensor"
"""The inputs of a model: one tensor, positional arguments, or named ones."""


def scalar_of(output: Any) -> Tensor:
    """The loss in what a model returns; see `TrainingProgram.of`."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        loss: Tensor = output["loss"]
        return loss
    if isinstance(getattr(output, "loss", None), Tensor):
        loss = output.loss
        return loss
    while isinstance(output, (tuple, list, Mapping)) and output:
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    if not isinstance(output, Tensor):
        raise PlanError(
            f"expected a model that returns a loss or a tensor, found {type(output).__name__}; have it return "
            "one, or pass flatparam.plan() a loss=, a function that makes a scalar of what the model returns"
        )
    return output if output.dim() == 0 else output.sum()


def tokens_for(model: nn.Module, *, batch: int, sequence: int) -> Inputs:
    """Token ids, all zero, and labels if the model takes any, under the names that its forward has for them.

    A model of transformers that has a decoder beside its encoder gets token ids for it, too, and one of pictures gets
    `[batch, channels, height, width]` pixels, as its configuration says.
    """
    names = [
        each.name
        for each in inspect.signature(model.forward).parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    if "input_ids" in names:
        named = {"input_ids": tokens}
        if "labels" in names:
            named["labels"] = torch.zeros(batch, sequence, dtype=torch.int64)
        elif "decoder_input_ids" in names:
            named["decoder_input_ids"] = torch.zeros(batch, sequence, dtype=torch.int64)
        return named
    config: Any = getattr(model, "config", None)
    if "pixel_values" in names and isinstance(getattr(config, "image_size", None), int):
        size = config.image_size
        return {"pixel_values": torch.zeros(batch, getattr(config, "num_channels", 3), size, size)}
    if len(names) > 1 and any(each in names[1] for each in ("target", "label")):
        return tokens, torch.zeros(batch, sequence, dtype=torch.int64)
    return (tokens,)
