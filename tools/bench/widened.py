"""Linear layers of bf16 whose products are computed in fp32: for CPUs that have no instructions for bf16.

There torch multiplies bf16 matrices in plain loops, some of them a hundred times slower than in fp32, and a step would
tell of nothing else. With these layers a step in bf16 takes 1.3 to 1.7 times as long as one in fp32; parameters,
gradients and messages are of bf16 as with any others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Product(torch.autograd.Function):
    """`F.linear`, rounded to the dtype of its input once; nothing of fp32 is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of `x` `[..., rows, inputs]`, `weight` `[outputs, inputs]` and `bias` `[outputs]`."""
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients that are needed, in the dtypes of what they are of."""
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        wide = gradient.float()
        rows = wide.flatten(0, -2)
        of_x = (wide @ weight.float()).to(x.dtype) if wants_x else None
        of_weight = (rows.t() @ x.float().flatten(0, -2)).to(weight.dtype) if wants_weight else None
        of_bias = rows.sum(0).to(gradient.dtype) if wants_bias else None
        return of_x, of_weight, of_bias


class WidenedLinear(nn.Linear):
    """An `nn.Linear` whose products are computed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., rows, inputs]` to `[..., rows, outputs]`."""
        out: Tensor = _Product.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def multiplies_bf16() -> bool:
    """Whether torch has fast kernels for products of bf16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widen(model: nn.Module) -> None:
    """Let every linear layer of `model` compute in fp32, where this CPU cannot multiply bf16."""
    if multiplies_bf16():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WidenedLinear
