"""The communication hooks that FSDP1 comes with: an average, of whole gradients or of shards, in full or in 16 bits.

Each is divided before and after the sum, by factors whose product is the number of ranks: so neither the summands nor
the sum leave the range of a 16-bit dtype. A hook leaves its result in a tensor that the caller passes, readable in
the order of the current stream; nothing is needed that CPU tensors have not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatparam_comm import Collectives, resolve_topology
from flatparam_runtime import gradient_divisors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


class DefaultState:
    """What a hook needs to know: the ranks to average over, and the factors to divide by before and after the sum.

    Args:
        process_group: a process group of torch's, or `Collectives`.

    Raises:
        ValueError: for `None`: a hook does not guess.
    """

    __slots__ = [
        "process_group",
        "world_size",
        "gradient_predivide_factor",
        "gradient_postdivide_factor",
    ]

    def __init__(self, process_group: ProcessGroup | Collectives) -> None:
        """See the class."""
        if process_group is None:
            raise ValueError(
                f"{type(self).__name__}: expected a process group or Collectives, found None; "
                "pass torch.distributed.group.WORLD for all ranks"
            )
        self.process_group = process_group
        self.world_size = resolve_topology(process_group).shard.size
        before, after = gradient_divisors(self.world_size)
        self.gradient_predivide_factor = before
        self.gradient_postdivide_factor = after


class LowPrecisionState(DefaultState):
    """What a hook that reduces in 16 bits needs to know besides: the dtype that its result is to have.

    Args:
        process_group: as for `DefaultState`.
        parameter_type: the parameters' own dtype.
    """

    __slots__ = ["parameter_type"]

    def __init__(
        self, process_group: ProcessGroup | Collectives, parameter_type: torch.dtype = torch.float32
    ) -> None:
        """See the class."""
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

    `grad` has as many times the elements of `output` as there are ranks; what it holds afterwards is undefined.
    """
    _divide(grad, state.gradient_predivide_factor)
    ranks = resolve_topology(state.process_group).shard
    ranks.reduce_scatter(output.view(-1), grad.reshape(-1), label="reduce_scatter_hook").wait()
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in fp16: `grad` itself, or its slice in `output` where there is one.

    The result has the dtype `state.parameter_type`: a tensor of another dtype is given it, with memory of its own.
    """
    _average_in(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in bf16: `grad` itself, or its slice in `output` where there is one.

    The result has the dtype `state.parameter_type`: a tensor of another dtype is given it, with memory of its own.
    """
    _average_in(torch.bfloat16, state, grad, output)


def _average_in(dtype: torch.dtype, state: LowPrecisionState, grad: Tensor, output: Tensor | None) -> None:
    narrow = grad.to(dtype)
    if output is None:
        allreduce_hook(state, narrow)
        _store(narrow, grad, state.parameter_type)
    else:
        reduced = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, narrow, reduced)
        _store(reduced, output, state.parameter_type)


def _divide(tensor: Tensor, factor: float) -> None:
    if factor > 1:
        tensor.div_(factor)


def _store(result: Tensor, where: Tensor, dtype: torch.dtype) -> None:
    """Have `where` hold `result` in `dtype`; in its own memory, where that has the dtype already.

    The memory of `result` was last used by a collective that has been waited for, so that on CUDA the current stream
    comes after it: the allocator may give it to whoever is next on this stream.
    """
    if where.dtype == dtype:
        if where is not result:
            where.copy_(result)
    else:
        where.data = result.to(dtype)  # the caller's own tensor object is how a hook gives its result
