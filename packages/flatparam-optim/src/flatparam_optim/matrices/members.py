"""Which ranks have a gradient of each matrix: compared in every step, without a host that waits for its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_comm import FlatParamError, Mark, ReduceOp, Topology, streams_of
from flatparam_optim.matrices.members import Member

__all__ = ["Presence"]


@final
@attrs.define(eq=False)
class Presence:
    """What the ranks have told each other in one step about the gradients of some matrices.

    After a backward pass all ranks that hold a part of a matrix have its gradient, or none has, and each knows it by
    its own part. Only a user can make ranks differ. On the CPU the comparison is there before anything is stepped. The
    host of an accelerator would have to wait for it, so it looks at it in the next step.
    """

    _members: Sequence[Member]
    _rank: int
    _device: torch.device
    _runs_ahead: bool
    """Whether the host would have to wait for the comparison."""
    _own: bytes
    """Two flags for each matrix: this rank holds a part of it with a gradient, and one without."""
    _told: Tensor | None
    """The flags of all ranks together, on the host; `None` if nobody compares."""
    _landed: Mark | None
    """The point at which the copy to the host ends, if it is not made yet."""

    @classmethod
    def begin(cls, members: Sequence[Member], topology: Topology, device: torch.device) -> Self:
        """Tell the other ranks which gradients this one has; every rank calls it.

        Args:
            device: the device that the groups reach.
        """
        own = b"".join(map(_flags, members))
        streams = streams_of(device)
        if streams.is_capturing:
            # The host cannot look at what a graph does; the next step that is not captured compares.
            return cls(members, topology.rank, device, True, own, None, None)
        # No step waits for the comparison.
        with streams.aside() as copies:
            flags = streams.to_device(torch.frombuffer(bytearray(own), dtype=torch.uint8), device)
            for group in topology.groups:
                group.all_reduce(flags, op=ReduceOp.MAX, label="gradients of matrices").wait()
            told = streams.to_host(flags)
        return cls(members, topology.rank, device, streams.runs_ahead, own, told, copies.end)

    @property
    def is_late(self) -> bool:
        """Whether the host looks at the comparison in the next step."""
        return self._runs_ahead and self._told is not None

    @property
    def may_look(self) -> bool:
        """Whether the host may ask the device now: not while a graph is captured."""
        return not streams_of(self._device).is_capturing

    def to_step(self) -> list[bool]:
        """For each matrix, whether it is stepped, as far as this rank knows.

        A rank that holds no part of a matrix, and whose host does not know, takes it that the others have a gradient.
        """
        flags = self._own if self._runs_ahead or self._told is None else bytes(self._told.tolist())
        return [bool(has) or not lacks for has, lacks in zip(flags[::2], flags[1::2], strict=True)]

    def look(self) -> None:
        """Note it if the comparison has come, so that nothing has to wait for it later."""
        if self._landed is not None and self._landed.is_reached():
            self._landed = None

    def check(self) -> None:
        """Check that the ranks have the same gradients; wait for the comparison if it has not come yet.

        Raises:
            FlatParamError: on every rank, if only some ranks that hold a part of a matrix have its gradient.
        """
        if self._told is None:
            return  # Nobody has compared.
        self.look()
        if self._landed is not None:
            self._landed.synchronize()
        told = bytes(self._told.tolist())
        for number, member in enumerate(self._members):
            if told[2 * number] and told[2 * number + 1]:
                raise FlatParamError(self._refusal(number, member))

    def _refusal(self, number: int, member: Member) -> str:
        has, lacks = self._own[2 * number], self._own[2 * number + 1]
        found = (
            "a gradient on this rank" if has else "no gradient on this rank" if lacks else "none on this rank"
        )
        outcome = (
            "so nothing was stepped"
            if not self._runs_ahead
            else "so the step before this one was wrong: load the state before it"
        )
        return (
            f"rank {self._rank}: parameter {member.spec.fqn!r}, of shape {member.spec.shape}, has {found}, and only "
            f"some of the ranks that hold a part of it have its gradient, {outcome}; give or drop the gradient of a "
            "parameter on all ranks"
        )


def _flags(member: Member) -> bytes:
    if not member.parameter.numel():
        return bytes((0, 0))
    has = member.parameter.grad is not None
    return bytes((has, not has))
