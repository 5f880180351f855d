"""A training program: a model, its inputs and its loss."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, final

import attrs
from torch import Tensor, nn

from flatparam_plan.training.inputs import Inputs, scalar_of, tokens_for

__all__ = ["TrainingProgram"]


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
        """The program that trains `model`.

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
        """The loss of one micro-batch."""
        if isinstance(inputs, Tensor):
            output = model(inputs)
        elif isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs)
        return self.loss(output)
