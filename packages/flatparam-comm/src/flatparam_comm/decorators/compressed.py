"""The decorator that sends numbers in fewer bytes, less exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from flatparam_comm import checks
from flatparam_comm.checks import Site
from flatparam_comm.collectives import Collectives, ContinuedPending, Pending, ReduceOp
from flatparam_comm.decorators.forwarding import ForwardingCollectives
from flatparam_comm.transfer.streams import keep


@final
class CompressedCollectives(ForwardingCollectives):
    """Wrap collectives in this to send real floating-point tensors in `dtype` (torch.bfloat16, say).

    Gathers, reduce-scatters and all-reduces that sum cast when they are called, communicate (and add) in `dtype`, and
    cast back in `wait()`. Tensors that are already as small, other dtypes, other reductions and broadcasts go through.
    A gather takes extra memory for the full buffer in `dtype` until it is waited for, and rounds this rank's own shard
    too, so every rank gets the same values. Raises ValueError if `dtype` is not a real floating-point dtype that every
    engine can add.
    """

    __slots__ = ("dtype",)

    def __init__(self, inner: Collectives, dtype: torch.dtype) -> None:
        """Send larger floating-point dtypes through `inner` in `dtype`."""
        super().__init__(inner)
        if not dtype.is_floating_point or dtype not in checks.REDUCIBLE:
            raise ValueError(
                f"CompressedCollectives: expected a floating-point dtype that can be reduced, found {dtype}; "
                "use torch.bfloat16 or torch.float16"
            )
        self.dtype = dtype

    @property
    def needs_equal_parts(self) -> bool:
        """An all-to-all would not be cast."""
        return True

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Gather shards that are cast, if that makes them smaller."""
        if not self._shrinks(shard):
            return self.inner.all_gather(output, shard, label=label)
        checks.check_all_gather(self._site("all_gather", label), output, shard)
        small_shard = self._cast(shard)
        small = small_shard.new_empty(output.numel())
        return ContinuedPending(self.inner.all_gather(small, small_shard, label=label), _cast_back(output, small))

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce what is cast, if it is a sum and casting makes it smaller."""
        if op is not ReduceOp.SUM or not self._shrinks(full):
            return self.inner.reduce_scatter(output, full, op=op, label=label)
        checks.check_reduce_scatter(self._site("reduce_scatter", label), output, full, op)
        small_full = self._cast(full)
        small = small_full.new_empty(output.numel())
        return ContinuedPending(
            self.inner.reduce_scatter(small, small_full, op=op, label=label), _cast_back(output, small)
        )

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce what is cast, if it is a sum and casting makes it smaller."""
        if op is not ReduceOp.SUM or not self._shrinks(tensor):
            return self.inner.all_reduce(tensor, op=op, label=label)
        checks.check_all_reduce(self._site("all_reduce", label), tensor, op)
        small = self._cast(tensor)
        return ContinuedPending(self.inner.all_reduce(small, op=op, label=label), _cast_back(tensor, small))

    def _decorate(self, inner: Collectives) -> Collectives:
        return CompressedCollectives(inner, self.dtype)

    def _shrinks(self, tensor: Tensor) -> bool:
        return tensor.dtype.is_floating_point and tensor.element_size() > self.dtype.itemsize

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.dtype)

    def _site(self, op: str, label: str) -> Site:
        return Site(rank=self.rank, size=self.size, op=op, label=label)


def _cast_back(output: Tensor, small: Tensor) -> Callable[[], None]:
    """Return the step that casts `small` back to `output`, once `small` holds the result."""

    def finish() -> None:
        with torch.no_grad():
            output.copy_(small)
        # `small` was allocated on the stream of the call and is read on that of the wait.
        keep(small)

    return finish
