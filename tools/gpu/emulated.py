"""A process group of eight ranks of which one exists, and a link that takes as long as one is told.

Every rank is taken to have this rank's data, so that results are those of one process. On an accelerator the group
keeps NCCL's order: it has a stream, one collective follows the other, and with `async_op=False` they are in the stream
of the caller. What a collective would take on the wire passes in `torch.cuda._sleep`, which keeps one multiprocessor
busy with one thread, so that computing goes on beside it. (Two ranks on one GPU are refused by NCCL, and gloo has the
host copy.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor

RANKS: Final = 8
BACKEND: Final = "emulated"
_CYCLES: Final = 100_000_000
_sleep: Final[Any] = torch.cuda._sleep
_Group: Final[Any] = dist.ProcessGroup  # whose types say another constructor


@define(eq=False)
class Link:
    """How many bytes pass in a second, and how many have. Of rate 0 all of them pass at once."""

    rate: float = 0.0
    cycles: float = 0.0
    """Of `torch.cuda._sleep` in a second."""
    sent: float = 0.0

    def measure_clock(self, device: torch.device) -> None:
        """Find out how long the device sleeps; only of CUDA it is known how to."""
        if device.type != "cuda":
            return
        for _ in range(2):  # the first time it may have to wake up
            torch.accelerator.synchronize(device)
            begin = time.perf_counter()
            _sleep(_CYCLES)
            torch.accelerator.synchronize(device)
            self.cycles = _CYCLES / (time.perf_counter() - begin)

    def carry(self, nbytes: float) -> None:
        """Let so many bytes pass in the current stream."""
        self.sent += nbytes
        if self.rate and self.cycles:
            _sleep(int(self.cycles * nbytes / self.rate))


class _Under(dist.Work):
    """A collective that is under way, or over."""

    def __init__(self, event: torch.Event | None, device: torch.device, tensors: Sequence[Tensor]) -> None:
        """`event` is where it ends in its stream; the tensors are kept until somebody has waited."""
        super().__init__()
        self._event, self._device, self._tensors = event, device, tensors

    def wait(self, timeout: Any = None) -> bool:
        """Have the current stream wait; after that the tensors need not be kept."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._tensors = ()
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._event is None or self._event.query()


class EmulatedGroup(dist.ProcessGroup):
    """See the module. `link` can be changed between two steps."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        """Be the only rank that there is."""
        _Group.__init__(self, rank, size)
        self.link = Link()
        self._stream: torch.Stream | None = None
        self._last: torch.Event | None = None

    def _gather(self, output: Tensor, shard: Tensor, opts: Any = None) -> dist.Work:
        ranks = self.size()

        def gather() -> None:
            is_inside = output.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
            output.view(ranks, -1).copy_((shard.clone() if is_inside else shard).reshape(1, -1))

        return self._issue(gather, (output, shard), output.nbytes * (ranks - 1) / ranks, opts)

    def _reduce_scatter(self, output: Tensor, full: Tensor, opts: Any = None) -> dist.Work:
        ranks, times = self.size(), self._times(opts)

        def reduce() -> None:
            torch.mul(full.view(ranks, -1)[self.rank()], times, out=output.view(-1))

        return self._issue(reduce, (output, full), full.nbytes * (ranks - 1) / ranks, opts)

    def _exchange(
        self, output: Tensor, given: Tensor, sizes: list[int], given_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        # Each rank gives this one what this one would give itself.
        ranks, rank = self.size(), self.rank()

        def exchange() -> None:
            parts = torch.split(given, given_sizes) if given_sizes else given.view(ranks, -1).unbind()
            output.view(ranks, -1).copy_(parts[rank].reshape(1, -1))

        return self._issue(exchange, (output, given), given.nbytes * (ranks - 1) / ranks, opts)

    def _sum(self, tensors: Any, opts: Any = None) -> dist.Work:
        # As many times what it is, or what it is.
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        times = self._times(opts)
        wire = 2 * sum(each.nbytes for each in tensors) * (self.size() - 1) / self.size()
        return self._issue(lambda: [each.mul_(times) for each in tensors], tensors, wire, opts)

    def _gather_list(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        # A copy for each rank.
        def gather() -> None:
            for of_ranks, own in zip(outputs, inputs, strict=True):
                for output in of_ranks:
                    output.copy_(own)

        return self._issue(gather, inputs, sum(each.nbytes for each in inputs) * (self.size() - 1), opts)

    def _broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        # Everybody has it already.
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return self._issue(lambda: None, tensors, tensors[0].nbytes, opts)

    def _barrier(self, opts: Any = None) -> dist.Work:
        # Nobody is waited for.
        return _Under(None, torch.device("cpu"), ())

    def _known_as(self) -> str:
        names: Any = dist.distributed_c10d._world.pg_names
        return str(names[self])

    # What torch calls: `single` is of torch 2.13.
    _allgather_base: Any = _gather
    _reduce_scatter_base: Any = _reduce_scatter
    all_gather_single: Any = _gather
    reduce_scatter_single: Any = _reduce_scatter
    alltoall_base: Any = _exchange
    all_to_all_single: Any = _exchange
    allreduce: Any = _sum
    allgather: Any = _gather_list
    broadcast: Any = _broadcast
    barrier: Any = _barrier
    group_name: Any = property(_known_as)

    def _times(self, opts: Any) -> int:
        """What a reduction multiplies by: a sum has a summand of each rank; a mean, or a maximum, is what it is of."""
        is_sum = getattr(opts, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.SUM
        return self.size() if is_sum else 1

    def _issue(self, action: Callable[[], object], tensors: Sequence[Tensor], wire: float, opts: Any) -> dist.Work:
        """Have the communicator's stream, or the caller's, do it after what was issued before."""
        device = tensors[0].device
        if device.type in ("cpu", "meta"):
            self.link.sent += wire
            action()
            return _Under(None, device, ())
        callers = torch.accelerator.current_stream(device)
        if self._stream is None:
            self._stream = torch.Stream(device)
        stream = self._stream if getattr(opts, "asyncOp", True) else callers
        stream.wait_event(callers.record_event())
        if self._last is not None:
            stream.wait_event(self._last)
        # Profiles know collectives by such ranges.
        with torch.profiler.record_function(f"c10d::{BACKEND}"), stream, torch.no_grad():
            self.link.carry(wire)
            action()
        self._last = stream.record_event()
        return _Under(self._last, device, tuple(tensors))


def _make(store: Any, rank: int, size: int, timeout: Any) -> EmulatedGroup:
    return EmulatedGroup(store, rank, size, timeout)


dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda", "xpu", "privateuseone"])
