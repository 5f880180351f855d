"""Adafactor, whose second moments are a row and a column for each matrix: as torch has it, and as transformers do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor

from flatparam_optim.matrix_step import count_step
from flatparam_optim.whole_optimizer import HALF, WholeOptimizer, add_scaled, at_least, decay, number


class _NewValues:
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
        """Return the elements of the parameter, as each is read and written a few times."""
        return max(1, math.prod(shape))

    def apply(self, part: Tensor, update: Tensor, shape: Sequence[int], settings: Any) -> None:
        """Take the new values."""
        part.copy_(update)


@final
@attrs.frozen
class _Factored(_NewValues):
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
        """Return the weight of the new squares in the averages."""
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


def _are_all(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is stepped by the rule: each is."""
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
        super().__init__(params, _Factored(), "adafactor", defaults, {}, _are_all)


# Adafactor as Hugging Face's transformers have it, with relative steps and an optional first moment


@final
@attrs.frozen
class _Relative(_NewValues):
    """The rule of `transformers.optimization.Adafactor`: by default algorithm 6 of the paper that `Adafactor` names.

    Half precision is computed in float32. The owner has the rows and columns of parameters with two or more dimensions,
    the first moments, and the root mean square of the values, and returns new values. Second moments of vectors belong
    to each part, whose update travels in place of its gradient.
    """

    @property
    def part_states(self) -> frozenset[str]:
        return frozenset({"step", "exp_avg_sq"})

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        wide = torch.float32 if dtype in HALF else dtype
        return wide, wide

    def prepare(self, part: Tensor, gradient: Tensor, state: Any, settings: Any) -> Sequence[Tensor]:
        count_step(state)
        wide, _ = self.dtypes(part.dtype)
        values, gradient = part.to(wide), gradient.to(wide)
        if part.dim() > 1:
            return values, gradient
        keep = self._kept(state, settings)
        squares = _average(state, "exp_avg_sq", gradient)
        squares.mul_(keep).add_(gradient**2 + settings["eps"][0], alpha=1.0 - keep)
        return values, squares.rsqrt().mul_(gradient)

    def step(self, whole: Sequence[Tensor], state: Any, settings: Any) -> Tensor:
        values, update = whole
        state["RMS"] = _root_mean_square(values)
        rate = self._rate(state, settings)
        if values.dim() > 1:
            update = self._factored(update, state, settings)
        update.div_((_root_mean_square(update) / settings["clip_threshold"]).clamp_(min=1.0))
        update.mul_(rate)
        beta = settings["beta1"]
        if beta is not None:
            update = _average(state, "exp_avg", update).mul_(beta).add_(update, alpha=1 - beta)
        if settings["weight_decay"] != 0:
            add_scaled(values, values, number(-settings["weight_decay"] * rate))
        return values.add_(-update)

    @staticmethod
    def _kept(state: Any, settings: Any) -> float:
        """Return the weight of the averages of squares so far."""
        return 1.0 - math.pow(float(state["step"]), settings["decay_rate"])

    @staticmethod
    def _rate(state: Any, settings: Any) -> Any:
        """Return the learning rate: a number, or a tensor of one if it is relative to the values' size."""
        rate, step = settings["lr"], float(state["step"])
        if settings["relative_step"]:
            rate = min(1e-6 * step if settings["warmup_init"] else 1e-2, 1.0 / math.sqrt(step))
        if not settings["scale_parameter"]:
            return rate
        size, least = state["RMS"], settings["eps"][1]
        return (max(least, size) if size.device.type == "cpu" else size.clamp(min=least)) * rate

    def _factored(self, gradient: Tensor, state: Any, settings: Any) -> Tensor:
        keep = self._kept(state, settings)
        squares = gradient**2 + settings["eps"][0]
        for name, dim in (("exp_avg_sq_row", -1), ("exp_avg_sq_col", -2)):
            means = squares.mean(dim=dim)
            _average(state, name, means).mul_(keep).add_(means, alpha=1.0 - keep)
        rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        of_rows = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        return torch.mul(of_rows, columns.unsqueeze(-2).rsqrt()).mul_(gradient)


def _average(state: Any, name: str, like: Tensor) -> Tensor:
    """The average under this name, zeros at first; torch has made it narrow if it was loaded for narrow parameters."""
    found: Tensor = state[name].to(like.dtype) if name in state else torch.zeros_like(like)
    state[name] = found
    return found


def _root_mean_square(tensor: Tensor) -> Tensor:
    root: Tensor = tensor.norm(2) / tensor.numel() ** 0.5
    return root


@final
class TransformersAdafactor(WholeOptimizer):
    """`transformers.optimization.Adafactor` for sharded parameters of any layout, with its numbers, to the bit.

    It is Adafactor with the relative steps of the paper, by which T5 and its kin are trained. transformers need not
    be installed.
    """

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        """Make the optimizer; the arguments are those of `transformers.optimization.Adafactor`, with their defaults.

        Args:
            params: as for `Muon`; all of them are stepped by Adafactor.
            lr: the learning rate, if steps are not relative.
            eps: what is added to squared gradients, and the least root mean square of a parameter.
            clip_threshold: updates with a root mean square above this are scaled down to it.
            decay_rate: the exponent by which the weight of new squares falls with the steps.
            beta1: how much of the first moment a step keeps; None has no first moment.
            weight_decay: the decoupled weight decay.
            scale_parameter: multiply the learning rate by the root mean square of the parameter.
            relative_step: the learning rate falls with the root of the steps, and `lr` is None.
            warmup_init: relative steps begin with a learning rate that rises from zero.

        Raises:
            ValueError: for settings that contradict each other, or that are out of range.
        """
        if (lr is None) != relative_step:
            raise ValueError(
                "TransformersAdafactor: expected either relative_step=True and lr=None, or relative_step=False and a "
                f"learning rate, found relative_step={relative_step} and lr={lr}"
            )
        if warmup_init and not relative_step:
            raise ValueError("TransformersAdafactor: expected relative_step=True with warmup_init=True, found False")
        if min(lr or 0.0, weight_decay, *eps) < 0.0 or clip_threshold <= 0.0:
            raise ValueError(
                "TransformersAdafactor: expected lr, weight_decay and eps that are not negative, and a clip_threshold "
                f"above 0; found {lr}, {weight_decay}, {eps} and {clip_threshold}"
            )
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, _Relative(), "adafactor", defaults, {}, _are_all)
