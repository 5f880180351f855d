"""The communication hooks that FSDP1 comes with: an average, of whole gradients or of shards, in full or in 16 bits.

| strategy | hook | ranks of its state |
| --- | --- | --- |
| `FULL_SHARD`, `SHARD_GRAD_OP`, inside the groups of a hybrid one | `reduce_scatter_hook` | `model.process_group` |
| `NO_SHARD` | `allreduce_hook` | `model.process_group` |
| across the groups of a hybrid one: stage `"all_reduce"` | `allreduce_hook` | the replicate group |
| each of these | `fp16_compress_hook`, `bf16_compress_hook` | the same |

Each hook divides before and after the sum, by factors whose product is the number of ranks, so that neither the
summands nor the sum leave the range of a 16-bit dtype. A hook is complete when it returns (on CUDA: in the order of the
current stream), and works on CPU tensors too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from flatparam_comm import Collectives, gradient_divisors, resolve_topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DefaultState:
    """The state of a hook: the ranks to average over, and the factors to divide by before and after the sum.

    Args:
        process_group: a process group of torch, or `Collectives`, such as `model.process_group`.

    Raises:
        ValueError: if `process_group` is `None`, because a hook does not guess, or several groups.
    """

    __slots__ = ["process_group", "world_size", "gradient_predivide_factor", "gradient_postdivide_factor"]

    def __init__(self, process_group: ProcessGroup | Collectives) -> None:
        """Take the ranks, and choose the factors."""
        if process_group is None:
            raise ValueError(
                f"{type(self).__name__}: expected a process group or Collectives, found None; "
                "pass the model's process_group"
            )
        topology = resolve_topology(process_group)
        if topology.replicate is not None:
            raise ValueError(
                f"{type(self).__name__}: expected one group, found two: {process_group!r}; a hook works in one stage, "
                "so pass the group of that stage"
            )
        self.process_group = process_group
        self.world_size = topology.shard.size
        before, after = gradient_divisors(self.world_size)
        self.gradient_predivide_factor = before
        self.gradient_postdivide_factor = after


class LowPrecisionState(DefaultState):
    """The state of a hook that reduces in 16 bits, which also has the dtype of the resulting shards.

    Args:
        process_group: as for `DefaultState`.
        parameter_type: the parameters' own dtype.
    """

    __slots__ = ["parameter_type"]

    def __init__(self, process_group: ProcessGroup | Collectives, parameter_type: torch.dtype = torch.float32) -> None:
        """Take the ranks and the parameters' dtype, and choose the factors."""
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: Tensor) -> None:
    """Replace `grad` (any shape) by its mean over the ranks."""
    dense = grad.contiguous()
    _divide(dense, state.gradient_predivide_factor)
    resolve_topology(state.process_group).shard.all_reduce(dense, label="allreduce_hook").wait()
    _divide(dense, state.gradient_postdivide_factor)
    if dense is not grad:
        grad.copy_(dense)


def reduce_scatter_hook(state: DefaultState, grad: Tensor, output: Tensor) -> None:
    """Fill `output` with this rank's slice of the mean of `grad` over the ranks.

    `grad` has as many times the elements of `output` as there are ranks. Afterwards its values are undefined.
    """
    _divide(grad, state.gradient_predivide_factor)
    ranks = resolve_topology(state.process_group).shard
    ranks.reduce_scatter(output.view(-1), grad.reshape(-1), label="reduce_scatter_hook").wait()
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in fp16: `grad` in place, or its slice to `output` if there is one.

    `output` gets the dtype `state.parameter_type`, and new memory if it had a different dtype. `grad` keeps its dtype
    and its memory.

    Raises:
        TypeError: if the gradients are complex.
    """
    _average_in(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in bf16: see `fp16_compress_hook`."""
    _average_in(torch.bfloat16, state, grad, output)


LOW_PRECISION_HOOKS: Final = (fp16_compress_hook, bf16_compress_hook)
"""The hooks that cast gradients themselves. Gradients reach every hook in the reduction dtype."""


def _average_in(dtype: torch.dtype, state: LowPrecisionState, grad: Tensor, output: Tensor | None) -> None:
    if grad.is_complex():
        raise TypeError(f"expected real gradients to average in {dtype}, found {grad.dtype}: use a different hook")
    narrow = grad.to(dtype)
    if output is None:
        allreduce_hook(state, narrow)
        if narrow is not grad:
            grad.copy_(narrow)
        return
    reduced = torch.empty_like(output, dtype=dtype)
    reduce_scatter_hook(state, narrow, reduced)
    if output.dtype == state.parameter_type:
        output.copy_(reduced)
    else:
        # The caller reads the result in this very object.
        output.data = reduced.to(state.parameter_type)


def _divide(tensor: Tensor, factor: float) -> None:
    if factor > 1:
        tensor.div_(factor)
