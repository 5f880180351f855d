"""A model that shows averages in the places of its own values, and gets its own memory back."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatparam_runtime import FlatParamError
from flatparam_state.averages.homes import Home, gradients_aside

__all__ = ["Average", "exchanged"]


@final
@attrs.define(eq=False)
class Average:
    """The average of one tensor of a model, which has that tensor's shape."""

    home: Home
    values: Tensor

    def beside(self) -> Tensor:
        """The average, on the device where the model's tensor is now; it stays there."""
        device = self.home.now().device
        if self.values.device != device:
            self.values = self.values.to(device)
        return self.values


@contextlib.contextmanager
def exchanged(averages: Sequence[Average], *, in_own_dtype: bool = False) -> Iterator[None]:
    """Have the model use the averages' memory; after the context, also after an exception, its own again.

    Extra memory: none for an average of the dtype that its tensor has; of the others a copy in the tensor's dtype.

    Args:
        in_own_dtype: show each average in its own dtype, whatever the model's is.
    """
    shown: list[tuple[Home, Tensor]] = []
    parameters = [id(each) for average in averages for each in average.home.parameters()]
    _refuse_steps()
    with gradients_aside([average.home for average in averages]):
        _lent.update(parameters)
        try:
            for average in averages:
                own, values = average.home.now(), average.beside()
                # First noted: an interrupt may come between the two.
                shown.append((average.home, own))
                average.home.give(values if in_own_dtype else values.to(own.dtype))
            yield
        finally:
            _lent.subtract(parameters)
            for home, own in shown:
                home.give(own)


_lent: Final[Counter[int]] = Counter()
"""How many exchanges each parameter, by identity, is in."""


@functools.cache
def _refuse_steps() -> None:
    """Have each optimizer in the process looked at when it steps; a second call does nothing."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not any(_lent.values()):
        return
    if any(_lent[id(each)] > 0 for group in optimizer.param_groups for each in group["params"]):
        raise FlatParamError(
            f"{type(optimizer).__name__}.step(): the model shows its averages, which a step would change; leave "
            "ShardedEMA.applied(model) first"
        )
