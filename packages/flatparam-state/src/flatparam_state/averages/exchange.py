"""A model that shows averages in the places of its own values, and gets its own memory back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final, final

import attrs
from torch import Tensor

from flatparam_state.homes import Home, gradients_aside
from flatparam_state.steps_refused import allow_steps, refuse_steps

__all__ = ["Average", "exchanged"]

_SHOWS_AVERAGES: Final = (
    "the model shows its averages, which a step would change; leave ShardedEMA.applied(model) first"
)


@final
@attrs.define(eq=False)
class Average:
    """The average of one tensor of a model, which has that tensor's shape."""

    home: Home
    values: Tensor

    def beside(self) -> Tensor:
        """Return the average, on the device where the model's tensor is now; it stays there."""
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
    parameters = [each for average in averages for each in average.home.parameters()]
    with gradients_aside([average.home for average in averages]):
        refuse_steps(parameters, _SHOWS_AVERAGES)
        try:
            for average in averages:
                own, values = average.home.now(), average.beside()
                # First noted: an interrupt may come between the two.
                shown.append((average.home, own))
                average.home.give(values if in_own_dtype else values.to(own.dtype))
            yield
        finally:
            allow_steps(parameters, _SHOWS_AVERAGES)
            for home, own in shown:
                home.give(own)
