"""A rank's use of each slot, and the tensors that it holds until a collective in the slot is finished."""

from __future__ import annotations

import struct
from typing import Final, Protocol, final

import attrs
import torch
from torch import Tensor

from flatparam_comm import Threshold
from flatparam_comm.checks import Site
from flatparam_comm.errors import CollectiveError, CommError
from flatparam_onehost.moves import PostedCall, SlotMove
from flatparam_onehost.segment import MessageSlot

MOST_MOVES: Final = Threshold(
    "comm.most_moves",
    512,
    "A slot of shared memory keeps the views of so many different calls for the next equal call; then it starts over.",
)
"""A program needs as many as it has units of different sizes."""
_PAIR: Final = struct.Struct("qq")
NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")


class Engine(Protocol):
    """The part of an engine that its pendings need."""

    @property
    def has_failed(self) -> bool:
        """Whether every call raises."""

    def finish(self, pending: SharedPending) -> None:
        """Wait for the peers and take the result, or raise."""


@final
@attrs.define(eq=False)
class SlotUse:
    """This rank's use of one slot: the number of its last collective there, and the pending of that collective."""

    slot: MessageSlot
    rank: int
    size: int
    number: int = 0
    pending: SharedPending | None = None
    moves: dict[tuple[str, torch.dtype, int, int], tuple[SlotMove, int]] = attrs.field(factory=dict)

    def move(self, op: str, dtype: torch.dtype, numel: int, detail: int) -> tuple[SlotMove, int]:
        """Return this rank's part in a call in this slot, and the code of the call; both are made on first use."""
        found = self.moves.get((op, dtype, numel, detail))
        if found is None:
            call = PostedCall(op, dtype, numel, detail)
            # Views that are made in inference mode can only be written to in that mode.
            with torch.inference_mode(False):
                if self.slot.reserve(call.slot_nbytes(self.size)) or len(self.moves) >= MOST_MOVES.value:
                    self.moves.clear()
                found = call.move(self.slot, self.rank, self.size), call.code
            self.moves[op, dtype, numel, detail] = found
        return found

    def all_posted(self, code: int) -> bool:
        """Return whether every rank has posted this call."""
        return self.slot.posted.tobytes() == _PAIR.pack(code, self.number) * self.size


@final
@attrs.define(eq=False)
class SharedPending:
    """A collective that this rank has issued. It holds the tensors until it is finished."""

    engine: Engine
    use: SlotUse
    site: Site
    move: SlotMove | None
    code: int
    target: Tensor
    source: Tensor
    error: CommError | None = None

    def wait(self) -> None:
        """Finish the collective; raise its error at each call."""
        if self.error is not None:
            raise self.error
        if self.move is not None:
            self.engine.finish(self)

    def done(self) -> bool:
        """Return whether every rank has posted, or the collective is over."""
        if self.move is None or self.engine.has_failed or self.use.all_posted(self.code):
            return True
        return min(self.use.slot.stamps) >= self.use.number

    def fail(self, error: CommError) -> None:
        """End the collective with this error, which each `wait` raises."""
        self.error = error
        self.release()

    def release(self) -> None:
        """End the collective, and drop the tensors."""
        self.move = self.use.pending = None
        self.target = self.source = NOTHING

    def check_held(self) -> None:
        """Raise CollectiveError if the memory under a tensor was freed: the next access would be to no memory."""
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
