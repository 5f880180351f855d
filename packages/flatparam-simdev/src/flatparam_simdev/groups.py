"""Process groups of the simulated device.

One behaves as one of NCCL's: it has one stream, on which its collectives run one after the other; a collective begins
after what was queued on the caller's stream; `wait()` makes the current stream wait, not the host; and it refuses
tensors of the CPU. The bytes move through gloo while the host queues the collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatparam_simdev.native import ACCELERATOR, NAME, capturable, on_cpu

_c10d: Any = dist  # what torch says of the types of its own classes does not hold for those made in Python
_WorkOfTorch: Any = _c10d.Work
_GroupOfTorch: Any = _c10d.ProcessGroup


class Work(_WorkOfTorch):  # type: ignore[misc]  # see above
    """A queued collective. It holds the tensors until somebody waits for it, as NCCL's does."""

    def __init__(self, name: str, group_stream: torch.Stream, tensors: Sequence[Tensor] = ()) -> None:
        """Record where the group's stream is now."""
        super().__init__()
        self.name = name
        self._done = group_stream.record_event()
        self._tensors = tuple(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; the host goes on."""
        self._done.wait(torch.accelerator.current_stream())
        self._tensors = ()
        return True

    def block_current_stream(self) -> None:
        """Make the current stream wait, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the device has come so far, as far as the host knows."""
        return bool(self._done.query())

    def is_success(self) -> bool:
        """Return True: nothing fails here."""
        return True


class Group(_GroupOfTorch):  # type: ignore[misc]  # see above
    """A communicator with a stream of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Make the group on this rank; torch calls it."""
        super().__init__(rank, size)
        self._bytes = _c10d.ProcessGroupGloo(_c10d.PrefixStore(f"{NAME}/", store), rank, size, timeout)
        self._stream = torch.Stream(device=NAME)

    @property
    def group_name(self) -> str:
        """Return the name that torch has given it."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def getBackendName(self) -> str:  # torch's name
        """Return the name of the backend."""
        return NAME

    name = getBackendName

    def _queue(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], move: Callable[[], None]) -> Work:
        """Queue a collective on the group's stream, behind what is queued on the current one."""
        for tensor in (*reads, *writes):
            if tensor.device.type != NAME:
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        reads, writes = [t.detach() for t in reads], [t.detach() for t in writes]
        self._stream.wait_event(torch.accelerator.current_stream().record_event())
        again = None
        if ACCELERATOR.is_capturing():
            again = move = capturable(move)
        ACCELERATOR.begin_collective(self._stream.stream_id, reads, writes)
        move()
        ACCELERATOR.end_collective(self._stream.stream_id, name, reads, writes, again)
        return Work(name, self._stream, [*reads, *writes])

    def _everybodys(self, tensor: Tensor) -> list[Tensor]:
        """Return the values that each rank has given, in the order of the ranks, as flat tensors of the CPU."""
        given = on_cpu(tensor).reshape(-1).clone()
        rows = given.new_empty((self.size(), given.numel()))
        if given.numel():
            as_bytes = [row.view(torch.uint8) for row in rows.unbind()]
            self._bytes.allgather([as_bytes], [given.view(torch.uint8)]).wait()
        return list(rows.unbind())

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        return _combine(self._everybodys(tensor), operation)

    def _allgather_base(self, output: Tensor, shard: Tensor, opts: Any = None) -> Work:
        def move() -> None:
            on_cpu(output).view(-1).copy_(torch.cat(self._everybodys(shard)))

        return self._queue("all_gather", [shard], [output], move)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], shards: list[Tensor], opts: Any = None) -> Work:
        """Gather several tensors in one collective."""

        def move() -> None:
            for output, shard in zip(outputs, shards, strict=True):
                on_cpu(output).view(-1).copy_(torch.cat(self._everybodys(shard)))

        return self._queue("all_gather", shards, outputs, move)

    def allgather(self, outputs: list[list[Tensor]], shards: list[Tensor], opts: Any = None) -> Work:
        """Gather into a list of tensors, one for each rank."""

        def move() -> None:
            for targets, shard in zip(outputs, shards, strict=True):
                for target, values in zip(targets, self._everybodys(shard), strict=True):
                    on_cpu(target).copy_(values.view(target.shape))

        return self._queue("all_gather", shards, [t for targets in outputs for t in targets], move)

    def _reduce_scatter_base(self, output: Tensor, full: Tensor, opts: Any = None) -> Work:
        def move() -> None:
            reduced = self._reduced(full, _operation(opts)).view(self.size(), -1)
            on_cpu(output).view(-1).copy_(reduced[self.rank()])

        return self._queue("reduce_scatter", [full], [output], move)

    def reduce_scatter(self, outputs: list[Tensor], given: list[list[Tensor]], opts: Any = None) -> Work:
        """Reduce a list of tensors, one for each rank."""

        def move() -> None:
            for output, tensors in zip(outputs, given, strict=True):
                reduced = [self._reduced(tensor, _operation(opts)) for tensor in tensors]
                on_cpu(output).copy_(reduced[self.rank()].view(output.shape))

        return self._queue("reduce_scatter", [t for tensors in given for t in tensors], outputs, move)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], given: list[Tensor], opts: Any = None) -> Work:
        """Reduce and scatter several tensors in one collective."""

        def move() -> None:
            for output, full in zip(outputs, given, strict=True):
                reduced = self._reduced(full, _operation(opts)).view(self.size(), -1)
                on_cpu(output).view(-1).copy_(reduced[self.rank()])

        return self._queue("reduce_scatter", given, outputs, move)

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce in place; several tensors are one collective."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)

        def move() -> None:
            for tensor in given:
                on_cpu(tensor).copy_(self._reduced(tensor, _operation(opts)).view(tensor.shape))

        return self._queue("all_reduce", given, given, move)

    allreduce_coalesced = allreduce

    def alltoall_base(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Work:
        """Give each rank a slice, and take one of each; without sizes they are equal."""

        def move() -> None:
            sizes = torch.tensor(sent or [given.numel() // self.size()] * self.size(), device="cpu")
            ours = on_cpu(given).reshape(-1)
            rows = [torch.empty_like(sizes) for _ in range(self.size())]
            self._bytes.allgather([rows], [sizes]).wait()
            longest = max(int(row.sum()) for row in rows)
            padded = torch.cat([ours, ours.new_zeros(longest - ours.numel())])
            everybodys, own = self._everybodys(padded), self.rank()
            theirs = [
                torch.split(all_of_rank[: int(row.sum())], row.tolist())[own]
                for all_of_rank, row in zip(everybodys, rows, strict=True)
            ]
            on_cpu(output).view(-1).copy_(torch.cat(theirs))

        return self._queue("all_to_all", [given], [output], move)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        """Give everybody what the root has."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = 0 if opts is None else opts.rootRank

        def move() -> None:
            for tensor in given:
                on_cpu(tensor).copy_(self._everybodys(tensor)[root].view(tensor.shape))

        reads, writes = (given, []) if self.rank() == root else ([], given)
        return self._queue("broadcast", reads, writes, move)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for everybody, on the host."""
        self._bytes.barrier().wait()
        return Work("barrier", self._stream)

    def _start_coalescing(self, device: torch.device) -> None:
        """Change nothing: what follows is queued on the one stream."""

    def _end_coalescing(self, device: torch.device) -> Work:
        """Return what stands for all that was queued."""
        return Work("coalesced", self._stream)

    # What torch 2.13 and later call them.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base


def _operation(options: Any) -> Any:
    return dist.ReduceOp(dist.ReduceOp.SUM) if options is None else options.reduceOp


def _as_nccl_reads(factor: Any, dtype: torch.dtype) -> Any:
    """Return the factor of PREMUL_SUM, as NCCL gets it from torch 2.11 to 2.13 (pytorch issue 190745).

    For sums in bfloat16 torch hands NCCL the address of a float32, of which NCCL reads the two bytes of a bfloat16: the
    low ones, which are zero for every power of two.
    """
    if dtype != torch.bfloat16 or isinstance(factor, Tensor):
        return factor
    return torch.tensor([factor], dtype=torch.float32).view(torch.bfloat16)[0]


def _combine(values: list[Tensor], operation: Any) -> Tensor:
    """Reduce in the order of the ranks, in the dtype of the values, as NCCL's rules are."""
    kind, factor = operation.__getstate__()  # torch has no other way to ask PREMUL_SUM for its factor
    pairwise = {dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.PRODUCT: torch.mul}
    if kind == dist.ReduceOp.PREMUL_SUM:
        scale = on_cpu(factor) if isinstance(factor, Tensor) and factor.device.type == NAME else factor
        values = [value * _as_nccl_reads(scale, value.dtype) for value in values]
    elif kind not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, *pairwise):
        raise RuntimeError(f"the simulated backend does not reduce with {kind}")
    total = functools.reduce(pairwise.get(kind, torch.add), values)
    return total / len(values) if kind == dist.ReduceOp.AVG else total
