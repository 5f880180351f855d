"""A training program: a model, its inputs and its loss."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_plan.plan_error import PlanError

__all__ = ["TrainingProgram", "Inputs", "scalar_of", "tokens_for"]


@final
@attrs.frozen(eq=False)
class TrainingProgram:
    """A program that trains: how its model, its inputs and its loss are made. Nothing is made before `train`."""

    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], Inputs]
    loss: Callable[[Any], Tensor]
    template: nn.Module | None = None
    """The module that `build` copies, if it does."""
    copies: Callable[[nn.Module, dict[int, Any]], nn.Module] = copy.deepcopy
    """Copies the template, as `copy.deepcopy` does with a memo."""
    keeps_cache: bool = False
    """Whether a model of transformers keeps keys and values for later tokens, if its configuration says so."""
    notes: tuple[str, ...] = ()
    """What the model does not say itself of how it is trained, for the reader of a plan."""

    @classmethod
    def of(
        cls,
        model: nn.Module | Callable[[], nn.Module],
        inputs: Inputs | Callable[..., Inputs] | None = None,
        *,
        batch: int = 1,
        sequence: int = 128,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> TrainingProgram:
        """Return the program that trains `model`.

        Args:
            model: a module, on any device, which is copied and not changed; or a function that makes one.
            inputs: what the model is called with; a function of `(batch, sequence)` that makes it; or `None` for token
                ids `[batch, sequence]`, and labels if the model takes any.
            batch: the rows of a micro-batch on a rank.
            sequence: the tokens of a row.
            loss: makes a scalar of what the model returns; by default that is `output.loss`, `output["loss"]`, the
                output itself if it is a scalar, or the sum of the first tensor.
        """
        build = functools.partial(copy.deepcopy, model) if isinstance(model, nn.Module) else model
        if inputs is None:
            make: Callable[[nn.Module], Inputs] = functools.partial(
                tokens_for, batch=batch, sequence=sequence
            )
        elif callable(inputs) and not isinstance(inputs, Tensor):
            given = inputs
            make = lambda _: given(batch, sequence)  # noqa: E731
        else:
            ready = inputs
            make = lambda _: ready  # noqa: E731
        return cls(build, make, loss or scalar_of, model if isinstance(model, nn.Module) else None)

    def call(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the loss of one micro-batch."""
        if isinstance(inputs, Tensor):
            output = model(inputs)
        elif isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs)
        return self.loss(output)


# The inputs of a model, and the loss in its output


Inputs: TypeAlias = "tuple[Any, ...] | Mapping[str, Any] | Tensor"
"""The inputs of a model: one tensor, positional arguments, or named ones."""


def scalar_of(output: Any) -> Tensor:
    """Return the loss in what a model returns; see `TrainingProgram.of`."""
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
