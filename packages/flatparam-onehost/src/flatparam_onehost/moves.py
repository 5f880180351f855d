"""A rank's copies into a slot and out of it, for each collective, dtype and size, through views that are made once.

The bytes of one collective of n ranks in its slot (P: bytes of one rank's part, T: of the whole tensor):

| collective | the slot | bytes |
| --- | --- | --- |
| all_gather | the gathered buffer | n P |
| reduce_scatter | a row for each rank, with the parts of all others | n (n - 1) P |
| all_reduce | each rank's tensor | n T |
| broadcast | the root's tensor | T |
| all_to_all, in equal parts | as of a reduce-scatter | n (n - 1) P |

Reductions add in rank order, in the tensors' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, final

import attrs
import torch
from torch import Tensor

from flatparam_comm import Threshold
from flatparam_comm.collectives import Parts, ReduceOp
from flatparam_onehost.segment import MessageSlot

_REDUCERS: Final[dict[ReduceOp, Callable[..., Tensor]]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}
#: The number of each reduction in a call.
REDUCTIONS: Final = {op: number for number, op in enumerate(ReduceOp)}
_BY_NUMBER: Final = tuple(REDUCTIONS)
_DTYPES: Final = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
WORTH_CUTTING: Final = Threshold(
    "comm.worth_cutting_nbytes",
    1 << 14,
    "Through shared memory, a gather in place copies the whole result below this; from here on without the own part.",
    least=0,
)

OPS: Final = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "exchange",
    "barrier",
    "subgroup",
    "all_to_all",
)
_DTYPE_BITS, _DETAIL_BITS, _NUMEL_BITS = 7, 13, 40


@final
@attrs.frozen
class PostedCall:
    """The facts that must be the same on every rank: the collective, its dtype, its size, its root or reduction.

    `numel` is that of the input; `detail` is the root, or the number of the reduction (`REDUCTIONS`).
    """

    op: str
    dtype: torch.dtype
    numel: int
    detail: int

    @property
    def code(self) -> int:
        """The call as a number of 63 bits."""
        head = OPS.index(self.op) << _DTYPE_BITS | _DTYPES.index(self.dtype)
        return (head << _DETAIL_BITS | self.detail) << _NUMEL_BITS | self.numel

    @classmethod
    def of(cls, code: int) -> PostedCall:
        """Return the call that has this code."""
        head, numel = code >> _NUMEL_BITS, code & ((1 << _NUMEL_BITS) - 1)
        kind, detail = head >> _DETAIL_BITS, head & ((1 << _DETAIL_BITS) - 1)
        return cls(OPS[kind >> _DTYPE_BITS], _DTYPES[kind & ((1 << _DTYPE_BITS) - 1)], numel, detail)

    def __str__(self) -> str:
        if self.op in OPS[4:]:
            return self.op
        detail = {"broadcast": f", root {self.detail}", "all_gather": ""}.get(
            self.op, f", {_BY_NUMBER[self.detail].value}"
        )
        return f"{self.op} ({self.numel} x {str(self.dtype).removeprefix('torch.')}{detail})"

    def move(self, slot: MessageSlot, rank: int, size: int) -> SlotMove:
        """Return the part of `rank` of `size` in this call, in this slot."""
        return _MOVES.get(self.op, _Meet)(self, slot, rank, size)

    def slot_nbytes(self, size: int) -> int:
        """Return the bytes that the call takes in a slot (see the table above)."""
        factor = {
            "all_gather": size,
            "exchange": size,
            "reduce_scatter": size - 1,
            "all_to_all": size - 1,
            "all_reduce": size,
            "broadcast": 1,
        }
        return factor.get(self.op, 0) * self.numel * self.dtype.itemsize


class SlotMove(Protocol):
    """One rank's part in one collective, in one slot."""

    def put(self, source: Tensor) -> None:
        """Copy the bytes that the others need into the slot."""

    def take(self, target: Tensor, source: Tensor) -> None:
        """Compute the result from the bytes of all ranks."""


@final
class _Meet:
    __slots__ = ()

    def __init__(self, call: PostedCall, slot: MessageSlot, rank: int, size: int) -> None:
        pass

    def put(self, source: Tensor) -> None:
        pass

    def take(self, target: Tensor, source: Tensor) -> None:
        pass


@final
class _Gather:
    __slots__ = ("after", "before", "mine", "nbytes", "rank", "start", "stop", "whole")

    def __init__(self, call: PostedCall, slot: MessageSlot, rank: int, size: int) -> None:
        self.rank, self.nbytes = rank, call.numel * call.dtype.itemsize
        self.start, self.stop = rank * call.numel, (rank + 1) * call.numel
        self.whole = slot.view(call.dtype, 0, size * call.numel)
        self.mine = self.whole[self.start : self.stop]
        self.before, self.after = self.whole[: self.start], self.whole[self.stop :]

    def put(self, source: Tensor) -> None:
        self.mine.copy_(source)

    def take(self, target: Tensor, source: Tensor) -> None:
        in_place = source.data_ptr() == target.data_ptr() + self.rank * self.nbytes
        if not in_place or self.nbytes < WORTH_CUTTING.value:
            target.copy_(self.whole)
            return
        if self.start:
            target[: self.start].copy_(self.before)
        if self.stop < target.numel():
            target[self.stop :].copy_(self.after)


@final
class Scatter:
    """A reduce-scatter; if the source is the target, the target already has this rank's own part."""

    __slots__ = ("after", "before", "parts", "rank", "reducer", "start", "stop")

    def __init__(self, call: PostedCall, slot: MessageSlot, rank: int, size: int) -> None:
        """Find the places of `rank` of `size` in `slot`."""
        part = call.numel // size
        row = part * (size - 1)
        self.rank, self.start, self.stop = rank, rank * part, (rank + 1) * part
        self.reducer = _REDUCERS[_BY_NUMBER[call.detail]]
        mine = slot.view(call.dtype, rank * row, row)
        self.before, self.after = mine[: self.start], mine[self.start :]
        # A row leaves out its owner's part, so the parts after that one are one place further ahead.
        self.parts = [
            slot.view(call.dtype, other * row + (rank - (rank > other)) * part, part)
            for other in range(size)
            if other != rank
        ]

    def put(self, source: Tensor) -> None:
        """Copy the parts of the other ranks into the slot."""
        if self.start:
            self.before.copy_(source[: self.start])
        if self.stop < source.numel():
            self.after.copy_(source[self.stop :])

    def put_parts(self, source: Parts, target: Tensor) -> None:
        """`put` a tensor that lies in parts, and write this rank's own part of it to `target`."""
        source.fill(0, self.before)
        source.fill(self.stop, self.after)
        source.fill(self.start, target)

    def take(self, target: Tensor, source: Tensor) -> None:
        """Add all ranks' parts of this rank's slice, in rank order."""
        own = target if source is target else source[self.start : self.stop]
        if not self.parts:
            target.copy_(own)
            return
        parts = self.parts
        if len(parts) > 1:
            parts = [*parts[: self.rank], own, *parts[self.rank :]]
            # No other rank reads the parts that were put here for this rank, so they can hold sums; the target may be
            # this rank's own part and is written last.
            total = parts[0] if self.rank else parts[1]
            self.reducer(parts[0], parts[1], out=total)
            for part in parts[2:-1]:
                self.reducer(total, part, out=total)
            self.reducer(total, parts[-1], out=target)
        elif self.rank:
            self.reducer(parts[0], own, out=target)
        else:
            self.reducer(own, parts[0], out=target)


@final
class Deal:
    """An all-to-all of equal parts; if the source is the target, the target already has this rank's own part."""

    __slots__ = ("scatter",)

    def __init__(self, call: PostedCall, slot: MessageSlot, rank: int, size: int) -> None:
        """Find the places of `rank` of `size` in `slot`, which are those of a reduce-scatter."""
        self.scatter = Scatter(call, slot, rank, size)

    def put(self, source: Tensor) -> None:
        """Copy the parts of the other ranks into the slot."""
        self.scatter.put(source)

    def put_parts(self, source: Parts, target: Tensor) -> None:
        """`put` a tensor that lies in parts, and write this rank's own part of it to its place in `target`."""
        self.scatter.put_parts(source, target[self.scatter.start : self.scatter.stop])

    def take(self, target: Tensor, source: Tensor) -> None:
        """Copy what every rank gives this one."""
        rank, parts = self.scatter.rank, [*self.scatter.parts]
        rows = [*target.view(len(parts) + 1, -1)]
        own = rows.pop(rank)
        if source is not target:
            own.copy_(source[self.scatter.start : self.scatter.stop])
        for row, part in zip(rows, parts, strict=True):
            row.copy_(part)


@final
class _AllReduce:
    __slots__ = ("mine", "parts", "reducer")

    def __init__(self, call: PostedCall, slot: MessageSlot, rank: int, size: int) -> None:
        self.parts = [slot.view(call.dtype, each * call.numel, call.numel) for each in range(size)]
        self.mine = self.parts[rank]
        self.reducer = _REDUCERS[_BY_NUMBER[call.detail]]

    def put(self, source: Tensor) -> None:
        self.mine.copy_(source)

    def take(self, target: Tensor, source: Tensor) -> None:
        parts = self.parts
        if len(parts) == 1:
            return
        self.reducer(parts[0], parts[1], out=target)
        for part in parts[2:]:
            self.reducer(target, part, out=target)


@final
class _Broadcast:
    __slots__ = ("is_root", "whole")

    def __init__(self, call: PostedCall, slot: MessageSlot, rank: int, size: int) -> None:
        self.whole = slot.view(call.dtype, 0, call.numel)
        self.is_root = rank == call.detail

    def put(self, source: Tensor) -> None:
        if self.is_root:
            self.whole.copy_(source)

    def take(self, target: Tensor, source: Tensor) -> None:
        if not self.is_root:
            target.copy_(self.whole)


_MOVES: Final[dict[str, Callable[[PostedCall, MessageSlot, int, int], SlotMove]]] = {
    "all_gather": _Gather,
    "exchange": _Gather,
    "reduce_scatter": Scatter,
    "all_reduce": _AllReduce,
    "broadcast": _Broadcast,
    "all_to_all": Deal,
}
