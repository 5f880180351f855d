"""torch's ring attention on a CPU: its own `context_parallel` asks for kernels of CUDA, but its ring takes any kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SEQUENCE = 2
"""The dimension of the sequence."""


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's part of a sequence, (batch, heads, length, width); keys and values travel.

    Every rank of the group has a part of the same length, in the order of ranks.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        _attention._cp_options.enable_load_balance = False  # parts are in the order of ranks
        ctx.ring, ctx.group = _attention, group
        given = [each.contiguous() for each in (query, key, value)]
        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found, sums, *_ = _attention._templated_ring_attention(group, SEQUENCE, kernel, *given, is_causal=True)
        ctx.save_for_backward(*given, found, sums)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = ctx.ring._templated_ring_attention_backward(
            ctx.group,
            SEQUENCE,
            kernel,
            gradient.contiguous(),
            "grad_out",
            *ctx.saved_tensors,
            is_causal=True,
            dropout_p=0.0,
        )
        return found[0], found[1], found[2], None
