"""What a rank knows of each slot, and what it holds until a collective in it is finished."""

from __future__ import annotations

import struct
from typing import Final, Protocol, final

import attrs
import torch
from torch import Tensor

from flatparam_comm.checks import Site
from flatparam_comm.errors import CollectiveError, CommError
from flatparam_comm.shared_memory.moves import Call, Move
from flatparam_comm.shared_memory.segment import Slot
from flatparam_core import Threshold

__all__ = ["NOTHING", "Place", "SharedPending"]

MOST_MOVES: Final = Threshold(
    "comm.most_moves",
    512,
    "Views that a slot of shared memory keeps for the next call of the same size; with more it begins anew.",
)
"""A program has as many as it has units of different sizes."""
_PAIR: Final = struct.Struct("qq")
NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")


class Engine(Protocol):
    """What a pending needs of the engine that made it."""

    @property
    def has_failed(self) -> bool:
        """Whether every call raises."""
        ...

    def finish(self, pending: SharedPending) -> None:
        """Wait for the peers and take the result, or raise."""
        ...


@final
@attrs.define(eq=False)
class Place:
    """One slot as this rank uses it: the last number that it had here, and what is pending for it."""

    slot: Slot
    rank: int
    size: int
    number: int = 0
    pending: SharedPending | None = None
    moves: dict[tuple[str, torch.dtype, int, int], tuple[Move, int]] = attrs.field(factory=dict)

    def move(self, op: str, dtype: torch.dtype, numel: int, detail: int) -> tuple[Move, int]:
        """How this rank does it in this slot, and the code of the call; made when it is asked for first."""
        found = self.moves.get((op, dtype, numel, detail))
        if found is None:
            call = Call(op, dtype, numel, detail)
            with torch.inference_mode(
                False
            ):  # views that are made in inference mode can be written to there only
                if self.slot.reserve(call.slot_nbytes(self.size)) or len(self.moves) >= MOST_MOVES.value:
                    self.moves.clear()
                found = call.move(self.slot, self.rank, self.size), call.code
            self.moves[op, dtype, numel, detail] = found
        return found

    def all_posted(self, code: int) -> bool:
        """Whether every rank has made this call."""
        return self.slot.posted.tobytes() == _PAIR.pack(code, self.number) * self.size


@final
@attrs.define(eq=False)
class SharedPending:
    """A collective that this rank has started. It holds the tensors until it is finished."""

    engine: Engine
    place: Place
    site: Site
    move: Move | None
    code: int
    target: Tensor
    source: Tensor
    error: CommError | None = None

    def wait(self) -> None:
        """See `Pending.wait`."""
        if self.error is not None:
            raise self.error
        if self.move is not None:
            self.engine.finish(self)

    def done(self) -> bool:
        """See `Pending.done`."""
        if self.move is None or self.engine.has_failed or self.place.all_posted(self.code):
            return True
        return min(self.place.slot.stamps) >= self.place.number

    def fail(self, error: CommError) -> None:
        """It ends with this error, at each `wait`."""
        self.error = error
        self.release()

    def release(self) -> None:
        """It is over: let go of the tensors."""
        self.move = self.place.pending = None
        self.target = self.source = NOTHING

    def check_held(self) -> None:
        """Raise CollectiveError when the memory under a tensor was freed: the next access would be to no memory."""
        for tensor in (self.target, self.source):
            held = tensor.untyped_storage().nbytes()
            if held < (tensor.storage_offset() + tensor.numel()) * tensor.itemsize:
                raise CollectiveError(
                    self.site.rank,
                    self.site.op,
                    self.site.label,
                    f"expected a storage that holds {tensor.numel()} elements until wait(), found {held} bytes; it was "
                    "freed while the collective was under way: wait before you free it",
                )
