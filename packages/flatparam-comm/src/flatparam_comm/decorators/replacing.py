"""The decorators that replace collectives: by the user's own functions, by fewer bytes, or by nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from flatparam_comm import checks
from flatparam_comm.collectives import COMPLETED, Collectives, ContinuedPending, Pending, ReduceOp
from flatparam_comm.decorators.forwarding import ForwardingCollectives
from flatparam_comm.single import OwnPartOnly
from flatparam_comm.transfer.streams import keep

#: `(inner, output, input, label) -> Pending | None`; None says that the output is ready (on CUDA: in the current
#: stream's order). For an all-reduce `output` and `input` are the same tensor.
CommHook = Callable[[Collectives, Tensor, Tensor, str], "Pending | None"]


@final
class HookedCollectives(ForwardingCollectives):
    """Wrap collectives in this to call your own functions instead; collectives without a function go through.

    A hook gets `inner` and may call any of its methods (in the same order on every rank). The arguments are checked
    before the hook is called. The hooks of reductions replace sums; other reductions go through. Subgroups have the
    same hooks.
    """

    __slots__ = ("_all_gather", "_all_reduce", "_reduce_scatter")

    def __init__(
        self,
        inner: Collectives,
        *,
        all_gather: CommHook | None = None,
        reduce_scatter: CommHook | None = None,
        all_reduce: CommHook | None = None,
    ) -> None:
        """Call these hooks instead of the methods of `inner` with the same names."""
        super().__init__(inner)
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter
        self._all_reduce = all_reduce

    @property
    def needs_equal_parts(self) -> bool:
        """Whether there are hooks that an all-to-all would pass by."""
        is_hooked = self._all_gather is not None or self._reduce_scatter is not None
        return is_hooked or super().needs_equal_parts

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Call the hook for gathers; without one, have `inner` gather."""
        if self._all_gather is None:
            return self.inner.all_gather(output, shard, label=label)
        checks.check_all_gather(checks.site_of(self, "all_gather", label), output, shard)
        return _started(self._all_gather(self.inner, output, shard, label))

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Call the hook for sums that are scattered; without one, have `inner` reduce."""
        if self._reduce_scatter is None or op is not ReduceOp.SUM:
            return self.inner.reduce_scatter(output, full, op=op, label=label)
        checks.check_reduce_scatter(checks.site_of(self, "reduce_scatter", label), output, full, op)
        return _started(self._reduce_scatter(self.inner, output, full, label))

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Call the hook for sums; without one, have `inner` reduce."""
        if self._all_reduce is None or op is not ReduceOp.SUM:
            return self.inner.all_reduce(tensor, op=op, label=label)
        checks.check_all_reduce(checks.site_of(self, "all_reduce", label), tensor, op)
        return _started(self._all_reduce(self.inner, tensor, tensor, label))

    def _decorate(self, inner: Collectives) -> Collectives:
        return HookedCollectives(
            inner, all_gather=self._all_gather, reduce_scatter=self._reduce_scatter, all_reduce=self._all_reduce
        )


def _started(pending: Pending | None) -> Pending:
    """Return the pending of a hook; a hook that has completed may return None."""
    return COMPLETED if pending is None else pending


@final
class SilentCollectives(OwnPartOnly, ForwardingCollectives):
    """Wrap collectives in this to measure a program without its communication. **The numbers become wrong.**

    A gather only puts this rank's shard in its place (the rest of the output stays as it was), a reduce-scatter only
    copies this rank's slice, an all-to-all only what a rank gives itself; all-reduce and broadcast do nothing.
    Arguments are checked and the control plane is real.
    """

    __slots__ = ()

    def _decorate(self, inner: Collectives) -> Collectives:
        return SilentCollectives(inner)


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
        checks.check_all_gather(checks.site_of(self, "all_gather", label), output, shard)
        small_shard = self._cast(shard)
        small = small_shard.new_empty(output.numel())
        return ContinuedPending(self.inner.all_gather(small, small_shard, label=label), _cast_back(output, small))

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce what is cast, if it is a sum and casting makes it smaller."""
        if op is not ReduceOp.SUM or not self._shrinks(full):
            return self.inner.reduce_scatter(output, full, op=op, label=label)
        checks.check_reduce_scatter(checks.site_of(self, "reduce_scatter", label), output, full, op)
        small_full = self._cast(full)
        small = small_full.new_empty(output.numel())
        return ContinuedPending(
            self.inner.reduce_scatter(small, small_full, op=op, label=label), _cast_back(output, small)
        )

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce what is cast, if it is a sum and casting makes it smaller."""
        if op is not ReduceOp.SUM or not self._shrinks(tensor):
            return self.inner.all_reduce(tensor, op=op, label=label)
        checks.check_all_reduce(checks.site_of(self, "all_reduce", label), tensor, op)
        small = self._cast(tensor)
        return ContinuedPending(self.inner.all_reduce(small, op=op, label=label), _cast_back(tensor, small))

    def _decorate(self, inner: Collectives) -> Collectives:
        return CompressedCollectives(inner, self.dtype)

    def _shrinks(self, tensor: Tensor) -> bool:
        return tensor.dtype.is_floating_point and tensor.element_size() > self.dtype.itemsize

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.dtype)


def _cast_back(output: Tensor, small: Tensor) -> Callable[[], None]:
    """Return the step that casts `small` back to `output`, once `small` holds the result."""

    def finish() -> None:
        with torch.no_grad():
            output.copy_(small)
        # `small` was allocated on the stream of the call and is read on that of the wait.
        keep(small)

    return finish
