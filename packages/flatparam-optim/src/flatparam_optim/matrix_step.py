"""The seam by which a user brings an optimizer of matrices: a function of matrix, gradient and state to an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor

from flatparam_optim.whole_optimizer import (
    Choice,
    WholeOptimizer,
    adamw_settings,
    add_scaled,
    are_matrices,
    decay,
    number,
)

Cost = Callable[[tuple[int, ...]], int]


class MatrixStep(Protocol):
    """A function that takes a matrix, its gradient and its state, all whole, and returns an update."""

    def __call__(self, matrix: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the update `U`: the matrix becomes `(1 - lr * weight_decay) * matrix - lr * U`.

        Args:
            matrix: the whole matrix, not to be changed; a meta tensor if the step does not need it.
            gradient: the whole gradient, of the same shape; may be changed.
            state: what the function keeps of this matrix between steps: tensors, of any shape, and plain values. Under
                `"step"` it finds how many steps there were, this one included, as a tensor of one number.

        Returns:
            A tensor of the matrix's shape.
        """


@final
@attrs.frozen
class _FunctionRule:
    """The rule that calls a `MatrixStep`; state stays with the owner, but the count of steps, which every part has."""

    function: MatrixStep
    needs_matrix: bool
    cost_of: Cost

    @property
    def streams(self) -> int:
        return 2 if self.needs_matrix else 1

    @property
    def keeps_state(self) -> bool:
        return True

    @property
    def part_states(self) -> frozenset[str]:
        return frozenset({"step"})

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        return dtype, dtype

    def cost(self, shape: Sequence[int], settings: Any) -> int:
        return max(1, int(self.cost_of(tuple(shape))))

    def prepare(self, part: Tensor, gradient: Tensor, state: Any, settings: Any) -> Sequence[Tensor]:
        count_step(state)
        return (gradient, part) if self.needs_matrix else (gradient,)

    def step(self, whole: Sequence[Tensor], state: Any, settings: Any) -> Tensor:
        gradient = whole[0]
        matrix = whole[1] if self.needs_matrix else torch.empty_like(gradient, device="meta")
        update = self.function(matrix, gradient, state)
        if update.shape != gradient.shape:
            raise ValueError(
                f"{self.function!r}: expected an update of shape {tuple(gradient.shape)}, found {tuple(update.shape)}"
            )
        return update

    def apply(self, part: Tensor, update: Tensor, shape: Sequence[int], settings: Any) -> None:
        rate = number(settings["lr"])
        decay(part, 1 - rate * settings["weight_decay"])
        add_scaled(part, update, -rate)


def count_step(state: Any) -> None:
    """Count a step in the state of a part, on the host, which reads it in each step."""
    step = state.get("step", 0.0)
    # Other optimizers, such as that of transformers, count in a number.
    state["step"] = step.cpu() if isinstance(step, Tensor) else torch.tensor(float(step), device="cpu")
    state["step"] += 1


class MatrixOptimizer(WholeOptimizer):
    """An optimizer made of a `MatrixStep`, for sharded parameters of any layout; AdamW steps the other parameters.

    Each matrix is stepped once in the world, by its owner, a rank that holds a part of it; there is what the function
    keeps, and it is saved and loaded with the rest of the state, at any number of ranks. Replicas share this work.
    """

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        step: MatrixStep,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        needs_matrix: bool = True,
        cost: Cost | None = None,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        matrices: Choice = are_matrices,
    ) -> None:
        """Make the optimizer.

        Args:
            params: as for `Muon`.
            step: the function; the same on every rank.
            lr: multiplies its updates.
            weight_decay: times `lr`, the part of each matrix that is taken off before.
            needs_matrix: whether the function reads its argument `matrix`; if not, only gradients travel.
            cost: what a step of a matrix of a given shape costs, in any unit, by which owners share the work; by
                default its number of elements times its shorter side.
            adamw_lr: the learning rate of the other parameters; by default `lr`.
            adamw_betas: of `torch.optim.AdamW`, as the next two.
            adamw_eps: see `adamw_betas`.
            adamw_weight_decay: see `adamw_betas`.
            matrices: says of a parameter, by name and full shape, whether the function steps it.

        Raises:
            ValueError: for a setting that is out of range.
        """
        name = type(self).__name__
        if lr < 0.0 or weight_decay < 0.0:
            raise ValueError(f"{name}: expected lr and weight_decay that are not negative, found {lr}, {weight_decay}")
        others = adamw_settings(lr if adamw_lr is None else adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay)
        rule = _FunctionRule(step, needs_matrix, cost or _default_cost)
        super().__init__(params, rule, "matrix", {"lr": lr, "weight_decay": weight_decay}, others, matrices)


def _default_cost(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel * min(shape, default=1)
