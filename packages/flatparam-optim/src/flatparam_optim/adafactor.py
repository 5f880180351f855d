"""Adafactor, whose second moments are a row and a column for each matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor

from flatparam_optim.matrix_step import count_step
from flatparam_optim.whole_optimizer import WholeOptimizer, add_scaled, at_least, decay, number

__all__ = ["Adafactor", "NewValues", "are_all"]


class NewValues:
    """A rule whose owner gets values and gradients of parameters of any shape, keeps state, and returns new values."""

    @property
    def streams(self) -> int:
        """Values and gradients travel."""
        return 2

    @property
    def keeps_state(self) -> bool:
        """The owner keeps state."""
        return True

    def cost(self, shape: Sequence[int], settings: Any) -> int:
        """The elements of the parameter, as each is read and written a few times."""
        return max(1, math.prod(shape))

    def apply(self, part: Tensor, update: Tensor, shape: Sequence[int], settings: Any) -> None:
        """Take the new values."""
        part.copy_(update)


@final
@attrs.frozen
class _Factored(NewValues):
    """Adafactor's rule (N. Shazeer, M. Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML
    2018, algorithms 4 and 5): of each parameter the root mean squares of the values and of the update count.

    The owner has the rows and columns of parameters with two or more dimensions, and returns new values. Second moments
    of vectors belong to each part, whose update travels in place of its gradient.
    """

    @property
    def part_states(self) -> frozenset[str]:
        return frozenset({"step", "variance"})

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        return dtype, dtype

    def prepare(self, part: Tensor, gradient: Tensor, state: Any, settings: Any) -> Sequence[Tensor]:
        count_step(state)
        gradient = -gradient if settings["maximize"] else gradient
        if part.dim() > 1:
            return part, gradient
        if "variance" not in state:
            state["variance"] = torch.zeros_like(gradient)
        state["variance"].lerp_(gradient * gradient, self._weight(state, settings))
        return part, self._scaled(state["variance"].clone(), gradient, settings)

    def step(self, whole: Sequence[Tensor], state: Any, settings: Any) -> Tensor:
        values, gradient = whole
        rate, eps = number(settings["lr"]), settings["eps"][1]
        size = at_least(eps, number(values.norm(2)) / math.sqrt(values.numel()))
        alpha = size * -at_least(-1 / state["step"].item() ** 0.5, -rate)
        if settings["weight_decay"] != 0:
            decay(values, 1 - rate * settings["weight_decay"])
        update = self._factored(gradient, state, settings) if values.dim() > 1 else gradient
        norm = number(update.norm(2)) / (math.sqrt(update.numel()) * settings["d"])
        scale = -alpha / at_least(1.0, norm)
        if isinstance(scale, Tensor):
            add_scaled(values, update, scale)
        else:
            values.add_(update, alpha=scale)
        return values

    @staticmethod
    def _weight(state: Any, settings: Any) -> float:
        """The weight of the new squares in the averages."""
        weight: float = state["step"].item() ** settings["beta2_decay"]
        return weight

    def _factored(self, gradient: Tensor, state: Any, settings: Any) -> Tensor:
        weight, product = self._weight(state, settings), None
        for name, dim in (("row_var", -1), ("col_var", -2)):
            squares = torch.norm(gradient, dim=dim, keepdim=True).square_().div_(gradient.size(dim))
            if name not in state:
                state[name] = torch.zeros_like(squares)
            state[name].lerp_(squares, weight)
        rows = state["row_var"]
        product = rows @ state["col_var"]
        product.div_(rows.mean(dim=-2, keepdim=True).clamp_(min=self._least(gradient, settings)))
        return self._scaled(product, gradient, settings)

    @staticmethod
    def _least(like: Tensor, settings: Any) -> float:
        least: float | None = settings["eps"][0]
        return torch.finfo(like.dtype).eps if least is None else least

    def _scaled(self, variance: Tensor, gradient: Tensor, settings: Any) -> Tensor:
        least = self._least(gradient, settings)
        return variance.clamp_(min=least * least).rsqrt_().mul_(gradient)


def are_all(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is stepped by the rule: each is."""
    return True


@final
class Adafactor(WholeOptimizer):
    """`torch.optim.Adafactor` for sharded parameters of any layout, with its numbers in one process, to the bit."""

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """Make the optimizer; the arguments are those of `torch.optim.Adafactor`, with their defaults.

        Args:
            params: as for `Muon`; all of them are stepped by Adafactor.
            lr: the relative learning rate, at most.
            beta2_decay: the exponent by which the weight of new squares falls with the steps.
            eps: the least of second moments (its root; by default that of the dtype), and of parameters' sizes.
            d: updates with a root mean square above this are scaled down to it.
            weight_decay: the decoupled weight decay.
            maximize: go up the gradient.

        Raises:
            ValueError: for a setting that is out of range.
        """
        for name, value in (("lr", lr), ("-beta2_decay", -beta2_decay), ("eps[1]", eps[1])):
            if value < 0.0:
                raise ValueError(f"Adafactor: expected {name} that is not negative, found {value}")
        if weight_decay < 0.0 or (eps[0] is not None and eps[0] < 0.0) or d < 1.0:
            raise ValueError(
                "Adafactor: expected weight_decay and eps[0] that are not negative, and d of 1 or more; found "
                f"{weight_decay}, {eps[0]} and {d}"
            )
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, _Factored(), "adafactor", defaults, {}, are_all)
