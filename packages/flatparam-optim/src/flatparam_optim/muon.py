"""Muon: momentum whose matrices are made orthogonal, and AdamW for the other parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, final

import attrs
import torch
from torch import Tensor

from flatparam_optim.matrices.matrix_owners import newton_schulz_flops
from flatparam_optim.whole_optimizer import (
    Choice,
    WholeOptimizer,
    adamw_settings,
    add_scaled,
    are_matrices,
    decay,
    number,
)

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Those of K. Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), and of torch.optim.Muon."""

AdjustRate = Literal["original", "match_rms_adamw"]


def orthogonalised(
    matrix: Tensor, *, steps: int = 5, coefficients: tuple[float, float, float] = _COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """Return a matrix with the singular vectors of `matrix`, and singular values near one.

    The quintic Newton-Schulz iteration `X <- a X + (b A + c A^2) X` with `A = X X^T`, in bfloat16, begins with the
    matrix divided by its norm (K. Jordan, 2024, as above).

    Args:
        matrix: of any floating-point dtype; of shape `(m, n)`.
        steps: iterations.
        coefficients: `a`, `b` and `c`.
        eps: the least that the norm counts as.

    Returns:
        A matrix of that shape, in bfloat16. Its memory is its own.
    """
    a, b, c = coefficients
    x = matrix.to(torch.bfloat16, copy=True)
    is_tall = matrix.size(0) > matrix.size(1)
    # The product with its transpose is the smaller one.
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


@final
@attrs.frozen
class _Orthogonal:
    """Muon's rule: the momentum belongs to each part, and only what is to be made orthogonal travels, in bfloat16."""

    @property
    def streams(self) -> int:
        return 1

    @property
    def keeps_state(self) -> bool:
        return False

    @property
    def steps_each_matrix(self) -> bool:
        return True

    @property
    def part_states(self) -> frozenset[str]:
        return frozenset({"momentum_buffer"})

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        # The iteration rounds to bfloat16 before all else, so nothing is lost on the way.
        return torch.bfloat16, torch.bfloat16

    def cost(self, shape: Sequence[int], settings: Any) -> int:
        *stack, rows, columns = shape
        return math.prod(stack) * newton_schulz_flops(rows, columns, max(1, settings["ns_steps"]))

    def prepare(self, part: Tensor, gradient: Tensor, state: Any, settings: Any) -> Sequence[Tensor]:
        momentum = settings["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"]
        average.lerp_(gradient, 1 - momentum)
        return (gradient.lerp(average, momentum) if settings["nesterov"] else average,)

    def step(self, whole: Sequence[Tensor], state: Any, settings: Any) -> Tensor:
        how = {"steps": settings["ns_steps"], "coefficients": settings["ns_coefficients"]}
        found = [
            orthogonalised(each, eps=settings["eps"], **how) for each in whole[0].reshape(-1, *whole[0].shape[-2:])
        ]
        return found[0] if whole[0].dim() == 2 else torch.stack(found).view(whole[0].shape)

    def apply(self, part: Tensor, update: Tensor, shape: Sequence[int], settings: Any) -> None:
        rate = number(settings["lr"])
        decay(part, 1 - rate * settings["weight_decay"])
        add_scaled(part, update, -_adjusted(rate, settings["adjust_lr_fn"], shape))


def _adjusted(rate: Any, rule: AdjustRate | None, shape: Sequence[int]) -> Any:
    """Return the learning rate of a matrix of `shape`, for which see `Muon`."""
    rows, columns = shape[-2:]
    if rule == "match_rms_adamw":
        return rate * (0.2 * math.sqrt(max(rows, columns)))
    return rate * math.sqrt(max(1, rows / columns))


@final
class Muon(WholeOptimizer):
    """`torch.optim.Muon` for sharded parameters of any layout, and AdamW for parameters that are not matrices.

    The numbers are those of `torch.optim.Muon` in one process, to the bit. Each matrix is made orthogonal once in the
    world, by its owner; owners share the work equally, over replicas too. Momentum stays sharded like the parameters,
    and so is saved like that of any optimizer; two bytes an element travel to the owner, and two back.
    """

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustRate | None = None,
        *,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        matrices: Choice = are_matrices,
    ) -> None:
        """Make the optimizer; the first arguments are those of `torch.optim.Muon`, with their defaults.

        Args:
            params: the parameters of a model, named or not, or groups of them; flat parameters stand for those in
                them. Settings of a group are those of its matrices, and of its other parameters with `adamw_` before.
            lr: the learning rate of matrices.
            weight_decay: the decoupled weight decay of matrices.
            momentum: the weight of the average of gradients.
            nesterov: mix the gradient into the average once more.
            ns_coefficients: those of the Newton-Schulz iteration.
            eps: the least norm that a matrix is divided by.
            ns_steps: the iterations, fewer than 100.
            adjust_lr_fn: multiply the learning rate of a matrix of shape `(m, n)` by `sqrt(max(1, m / n))`
                (`"original"`, or None), or by `0.2 sqrt(max(m, n))` (`"match_rms_adamw"`), so that AdamW's fits.
            adamw_lr: the learning rate of the other parameters; by default `lr`.
            adamw_betas: of `torch.optim.AdamW`, as the next two.
            adamw_eps: see `adamw_betas`.
            adamw_weight_decay: see `adamw_betas`.
            matrices: says of a parameter, by name and full shape, whether Muon steps it; by default it does if the
                parameter has two dimensions. Embeddings and the output layer are usually left to AdamW. Without named
                parameters, names are those below the unit. A parameter of more dimensions, such as the weights of
                experts, is a stack of the matrices of its last two, of which each is made orthogonal by itself.

        Raises:
            ValueError: for a setting that is out of range, or if a parameter of fewer than two dimensions is chosen.
        """
        if not lr >= 0.0:
            raise ValueError(f"Muon: expected a learning rate that is not negative, found {lr}")
        if not momentum >= 0.0:
            raise ValueError(f"Muon: expected a momentum that is not negative, found {momentum}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Muon: expected a weight decay that is not negative, found {weight_decay}")
        if not 0 <= ns_steps < 100:
            raise ValueError(f"Muon: expected fewer than 100 iterations, found ns_steps={ns_steps}")
        if len(ns_coefficients) != 3:
            raise ValueError(f"Muon: expected three coefficients, found {ns_coefficients!r}")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"Muon: expected adjust_lr_fn to be 'original' or 'match_rms_adamw', found {adjust_lr_fn!r}"
            )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        others = adamw_settings(lr if adamw_lr is None else adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay)
        super().__init__(params, _Orthogonal(), "muon", defaults, others, matrices)

    def _check(self, name: str | None, shape: tuple[int, ...]) -> None:
        if len(shape) < 2:
            raise ValueError(
                f"Muon: expected matrices, found {name or 'a parameter'!r} of shape {shape}; leave it to AdamW: with "
                "the argument matrices, or in a group with 'rule': 'adamw'"
            )
