"""The computation of one process: the part of each micro-batch in the gradient, and how exact it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_certify.case import Case
from flatparam_certify.meshes import MeshSizes
from flatparam_certify.trainer import cast

EPS: Final = torch.finfo(torch.float32).eps
_INSIDE: Final = 8.0
"""How much larger the rounding inside a micro-batch may be than that of this process, measured against float64."""
_FLOOR: Final = 32.0
"""Roundings of the largest element that are allowed inside a micro-batch in any case."""
_BF16: Final = 4.0
"""How much larger the error in bf16 may be than that of one process in bf16."""


@final
@attrs.frozen(eq=False)
class Expected:
    """The gradient of one parameter.

    Attributes:
        parts: the contributions in float64, of shape (micro-batches, data ranks, elements): their sum is the gradient.
        shape: that of the parameter.
        is_used: whether any micro-batch uses the parameter.
        additions: the roundings that any order of the sum and its divisions can have.
        inside: what rounding inside the micro-batches may add to each element, where an engine computes them in
            another way; absolute.
        bf16: the norm of the error that computing in bf16 may cause.
    """

    parts: Tensor
    shape: torch.Size
    is_used: bool
    additions: int
    inside: float
    bf16: float

    @property
    def total(self) -> Tensor:
        """Return the gradient in float64, of shape (elements,)."""
        return self.parts.sum((0, 1))

    def only(self, elements: Tensor) -> Expected:
        """Return what is expected of some elements alone."""
        return attrs.evolve(self, parts=self.parts[:, :, elements])


@final
@attrs.frozen(eq=False)
class StepExpected:
    """The findings of one process in a step.

    Attributes:
        losses: the loss of each micro-batch of each data rank, in float64, of shape (micro-batches, data ranks).
        loss_error: what each loss may differ by, of the same shape; in bf16 `loss_error_bf16`.
        gradients: those of the parameters, by name.
    """

    losses: Tensor
    loss_error: Tensor
    loss_error_bf16: Tensor
    gradients: dict[str, Expected]

    def norm(self) -> float:
        """Return the norm of the whole gradient."""
        return math.sqrt(sum(float(each.total.square().sum()) for each in self.gradients.values()))


@final
@attrs.define(eq=False)
class Reference:
    """One process that computes each micro-batch of each data rank by itself."""

    case: Case
    mesh: MeshSizes
    seed: int
    notes: list[str] = attrs.field(factory=list)
    _kept: dict[tuple[int, bool], StepExpected] = attrs.field(factory=dict, init=False)

    def model(self) -> nn.Module:
        """Return a new model."""
        return self.case.model(self.seed)

    def first(self, micro_batches: int, bf16: bool) -> StepExpected:
        """Return what is expected in the first step, from the weights that the model is built with."""
        key = (micro_batches, bf16)
        if key not in self._kept:
            self._kept[key] = self.step(None, 0, micro_batches, bf16)
        return self._kept[key]

    def step(self, weights: Mapping[str, Tensor] | None, step: int, micro_batches: int, bf16: bool) -> StepExpected:
        """Return what is expected in a step.

        Args:
            weights: the parameters before it, by name; None: those that the model is built with.
            bf16: whether to compute the band of bf16, too.
        """
        model = self.model()
        if weights is not None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[name].reshape(parameter.shape))
        ranks = self.mesh.data_ranks
        single = self._passes(model, step, micro_batches, torch.float32)
        double = self._tried(
            "float64", lambda: self._passes(copy.deepcopy(model).double(), step, micro_batches, torch.float64)
        )
        lower = []
        if bf16:
            with_autocast = self._tried("bf16 by autocast", lambda: self._passes(model, step, micro_batches, None))
            whole = self._tried(
                "bf16", lambda: self._passes(copy.deepcopy(model).bfloat16(), step, micro_batches, torch.bfloat16)
            )
            lower = [each for each in (with_autocast, whole) if each is not None]
        shape = (micro_batches, ranks)
        losses = torch.tensor([each[0] for each in single], dtype=torch.float64).reshape(shape)
        error = 64 * EPS * (1 + losses.abs())
        if double is not None:
            exact = torch.tensor([each[0] for each in double], dtype=torch.float64).reshape(shape)
            error += _INSIDE * (losses - exact).abs()
        error_bf16 = 2.0**-6 * (losses.abs() + 1e-3)
        for passes in lower:
            found = torch.tensor([each[0] for each in passes], dtype=torch.float64).reshape(shape)
            error_bf16 = torch.maximum(error_bf16, _BF16 * (losses - found).abs())
        gradients = {
            name: self._expected(name, parameter, single, double, lower) for name, parameter in model.named_parameters()
        }
        return StepExpected(losses, error, error_bf16, gradients)

    def _tried(self, what: str, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns; if the model cannot do it, note that, and return None."""
        try:
            return compute()
        except Exception as error:  # whatever the model raises in a precision that it does not know
            first_line = str(error).partition("\n")[0]
            note = f"one process cannot compute the case in {what} ({type(error).__name__}: {first_line})"
            if note not in self.notes:
                self.notes.append(note)
            return None

    def _passes(
        self, model: nn.Module, step: int, micro_batches: int, dtype: torch.dtype | None
    ) -> list[tuple[float, dict[str, Tensor | None]]]:
        """Return the loss and the gradients of each micro-batch of each data rank; None computes under autocast."""
        found = []
        for number in range(micro_batches):
            for rank in range(self.mesh.data_ranks):
                batch = self.case.draw(self.seed, step, number, rank)
                for parameter in model.parameters():
                    parameter.grad = None
                if dtype is None:
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = self.case.loss_of(model, batch)
                else:
                    given = batch if dtype == torch.float32 else cast(batch, dtype)
                    loss = self.case.loss_of(model, given)
                # As programs do that accumulate: so roundings are the same.
                (loss / micro_batches).backward()  # type: ignore[no-untyped-call]  # torch's
                gradients = {
                    name: None if each.grad is None else each.grad.double().reshape(-1) / self.mesh.data_ranks
                    for name, each in model.named_parameters()
                }
                found.append((float(loss.detach()), gradients))
        return found

    def _expected(self, name: str, parameter: nn.Parameter, single: Any, double: Any, lower: list[Any]) -> Expected:
        nothing = torch.zeros(parameter.numel(), dtype=torch.float64)

        def of(passes: Any) -> Tensor:
            return torch.stack([nothing if each[name] is None else each[name] for _, each in passes])

        parts = of(single)
        size = parts.abs().amax(1, keepdim=True) if parts.numel() else parts.new_zeros(len(parts), 1)
        inside = _FLOOR * EPS * float(size.sum())
        if double is not None and parts.numel():
            inside += _INSIDE * float((parts - of(double)).abs().amax(1).sum())
        # Each addition of a sum in bf16 rounds by at most 2 ** -8.
        bf16 = (len(parts) + self.mesh.ranks) * 2.0**-8 * float(parts.norm(dim=1).sum())
        for passes in lower:
            bf16 = max(bf16, _BF16 * float((of(passes) - parts).norm(dim=1).sum()))
        additions = len(parts) + self.mesh.ranks + 4
        is_used = any(each[name] is not None for _, each in single)
        shape = (len(parts) // self.mesh.data_ranks, self.mesh.data_ranks, parameter.numel())
        return Expected(parts.reshape(shape), parameter.shape, is_used, additions, inside, bf16)
