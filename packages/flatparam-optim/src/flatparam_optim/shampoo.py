"""Shampoo, as a `MatrixStep`: gradients times roots of what has been summed of their products."""

from __future__ import annotations

from typing import Any, final

import attrs
import torch
from torch import Tensor

from flatparam_optim.matrix_step import MatrixOptimizer
from flatparam_optim.whole_optimizer import Choice, are_matrices


@final
@attrs.frozen
class _Precondition:
    """The step of Shampoo (V. Gupta, T. Koren, Y. Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization",
    ICML 2018, algorithm 1): `L += G G^T`, `R += G^T G`, and the update is `L^(-1/4) G R^(-1/4)`.
    """

    eps: float
    every: int

    def __call__(self, matrix: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        wide = gradient.to(torch.float32)
        sides = {"left": wide @ wide.T, "right": wide.T @ wide}
        is_due = (int(state["step"].item()) - 1) % self.every == 0
        for name, product in sides.items():
            if name not in state:
                state[name] = self.eps * torch.eye(product.size(0), device=product.device)
            state[name] = state[name] + product
            if is_due:
                state[f"{name}_root"] = _inverse_fourth_root(state[name], self.eps)
        update: Tensor = state["left_root"] @ wide @ state["right_root"]
        return update.to(gradient.dtype)


def _cost(shape: tuple[int, ...]) -> int:
    # Eigenvectors of both sides take most of the time.
    return shape[0] ** 3 + shape[1] ** 3


def _inverse_fourth_root(matrix: Tensor, eps: float) -> Tensor:
    """`matrix^(-1/4)` of a symmetric matrix, whose eigenvalues count as `eps` at least."""
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp(min=eps).pow(-0.25)) @ vectors.T
    return root


@final
class Shampoo(MatrixOptimizer):
    """Shampoo for sharded parameters of any layout, with the numbers of one process; AdamW steps other parameters.

    A matrix of shape `(m, n)` has `2 (m^2 + n^2)` numbers of state, on its owner alone.
    """

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-1,
        weight_decay: float = 0.0,
        eps: float = 1e-4,
        every: int = 1,
        *,
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        matrices: Choice = are_matrices,
    ) -> None:
        """Make the optimizer.

        Args:
            params: as for `Muon`.
            lr: the learning rate of matrices.
            weight_decay: see `MatrixOptimizer`.
            eps: what the sums of products begin with on their diagonals.
            every: take the roots anew at every so many steps.
            adamw_lr: the learning rate of the other parameters.
            adamw_betas: of `torch.optim.AdamW`, as the next two.
            adamw_eps: see `adamw_betas`.
            adamw_weight_decay: see `adamw_betas`.
            matrices: says of a parameter, by name and full shape, whether Shampoo steps it.

        Raises:
            ValueError: for a setting that is out of range.
        """
        if eps <= 0.0 or every < 1:
            raise ValueError(f"Shampoo: expected eps above 0 and every of 1 or more, found {eps} and {every}")
        super().__init__(
            params,
            _Precondition(eps, every),
            lr,
            weight_decay,
            needs_matrix=False,
            cost=_cost,
            adamw_lr=adamw_lr,
            adamw_betas=adamw_betas,
            adamw_eps=adamw_eps,
            adamw_weight_decay=adamw_weight_decay,
            matrices=matrices,
        )
