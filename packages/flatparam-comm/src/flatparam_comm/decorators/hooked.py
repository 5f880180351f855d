"""The decorators that replace collectives by the user's own functions, or leave them out to measure their cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from flatparam_comm import checks
from flatparam_comm.collectives import COMPLETED, Collectives, Pending, ReduceOp, copied
from flatparam_comm.decorators.forwarding import ForwardingCollectives

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
class SilentCollectives(ForwardingCollectives):
    """Wrap collectives in this to measure a program without its communication. **The numbers become wrong.**

    A gather only puts this rank's shard in its place (the rest of the output stays as it was), a reduce-scatter only
    copies this rank's slice, an all-to-all only what a rank gives itself; all-reduce and broadcast do nothing.
    Arguments are checked and the control plane is real.
    """

    __slots__ = ()

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Copy `shard` to its place in `output`."""
        checks.check_all_gather(checks.site_of(self, "all_gather", label), output, shard)
        return copied(_slice_of(output, self.rank, shard.numel()), shard)

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Copy this rank's slice of `full` to `output`."""
        checks.check_reduce_scatter(checks.site_of(self, "reduce_scatter", label), output, full, op)
        return copied(output, _slice_of(full, self.rank, output.numel()))

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Leave `tensor` as it is."""
        checks.check_all_reduce(checks.site_of(self, "all_reduce", label), tensor, op)
        return COMPLETED

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Leave `tensor` as it is."""
        checks.check_broadcast(checks.site_of(self, "broadcast", label), tensor, root)
        return COMPLETED

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Copy what this rank gives itself to its place in `output`."""
        checks.check_all_to_all(checks.site_of(self, "all_to_all", label), output, given, output_numels, given_numels)
        target, own = output_numels[: self.rank], given_numels[: self.rank]
        numel = given_numels[self.rank]
        return copied(output.detach()[sum(target) :][:numel], given.detach()[sum(own) :][:numel])

    def _decorate(self, inner: Collectives) -> Collectives:
        return SilentCollectives(inner)


def _slice_of(whole: Tensor, rank: int, numel: int) -> Tensor:
    return whole.detach()[rank * numel : (rank + 1) * numel]
