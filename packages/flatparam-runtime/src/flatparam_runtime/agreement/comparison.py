"""The comparison at the end of a pass: do ranks diverge, and which parameters got a gradient on any rank?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_comm import FlatParamHandle, Mark, ReduceOp, streams_of
from flatparam_runtime.agreement.divergence import check_deeds, check_training, groups_of
from flatparam_runtime.agreement.fingerprint import FLAGS, Fingerprint
from flatparam_runtime.unit.unit import Unit, device_of


@final
@attrs.define(eq=False)
class _Mask:
    """A byte for each parameter of `handles`, in order, and the fingerprint's flags; a group takes their maximum."""

    handles: list[FlatParamHandle]
    flags: Tensor

    @classmethod
    def of(
        cls,
        device: torch.device,
        handles: list[FlatParamHandle],
        known: Mapping[FlatParamHandle, bytes],
        own: bytes,
        before: Sequence[_Mask],
    ) -> Self:
        """Return the mask of what is known here and in the masks of the groups `before`."""
        sent = bytearray(b"".join([*map(known.__getitem__, handles), own]))
        flags = streams_of(device).to_device(torch.frombuffer(sent, dtype=torch.uint8), device)
        for mask in before:
            mask._pass_on(handles, flags, len(own))
        return cls(handles, flags)

    def _pass_on(self, handles: Sequence[FlatParamHandle], flags: Tensor, own: int) -> None:
        mine = _parts_of(self.flags[:-own], self.handles)
        for handle, part in _parts_of(flags[:-own], handles).items():
            if handle in mine:
                part.copy_(mine[handle])
        flags[-own:].copy_(self.flags[-own:])


def _parts_of(flags: Tensor, handles: Sequence[FlatParamHandle]) -> dict[FlatParamHandle, Tensor]:
    return dict(zip(handles, torch.split(flags, [len(each.layout.slots) for each in handles]), strict=True))


@final
@attrs.define(eq=False)
class Comparison:
    """The result of comparing the ranks at the end of a pass; on an accelerator its copy to the host is in flight.

    Every rank issues one small all-reduce for each of its groups. The tensor holds a byte for each parameter, and the
    fingerprint of everything that this rank has done.
    """

    _units: Sequence[Unit]
    _fingerprint: Fingerprint
    _known: dict[FlatParamHandle, bytes]
    _own: bytes
    _noted: int
    """The number of collectives that the fingerprint covers."""
    _parts: list[tuple[Tensor, list[FlatParamHandle]]]
    """For each group, the tensor that is copied to the host, and the flat parameters of its flags, in order."""
    _landed: Mark | None
    """The point at which the copies to the host end, if they are not made yet."""
    _combined: bytes | None = None
    """The flags of all fingerprints, once they have been read."""
    looks_at_gradients: bool = False
    """Whether the flags end with a byte that says whether a gradient is not finite."""

    @classmethod
    def begin(
        cls,
        units: Sequence[Unit],
        known: Mapping[FlatParamHandle, bytes],
        fingerprint: Fingerprint,
        nonfinite: bool | None = None,
    ) -> Self:
        """Send the flags that this rank knows (`known`) and the fingerprint to the other ranks.

        Args:
            nonfinite: whether this rank has a gradient that is not finite; None, on all ranks, if nobody asks.
        """
        own = fingerprint.flags() + (b"" if nonfinite is None else bytes([nonfinite]))
        masks: list[_Mask] = []
        device = device_of(units)
        # No computation waits for the comparison, and the comparison waits for no computation.
        with streams_of(device).aside() as copies:
            for group, members in groups_of(units).items():
                handles = [handle for unit in members for handle in unit.handles if handle in known]
                if not masks or handles != masks[-1].handles:
                    masks.append(_Mask.of(device, handles, known, own, masks))
                # A group learns what the one before has seen.
                group.all_reduce(masks[-1].flags, op=ReduceOp.MAX, label="parameters with a gradient").wait()
            parts = [(streams_of(device).to_host(mask.flags), mask.handles) for mask in masks]
        looks = nonfinite is not None
        noted = fingerprint.noted
        return cls(units, fingerprint, dict(known), own, noted, parts, copies.end, looks_at_gradients=looks)

    def look(self) -> None:
        """Read the result if it has arrived; the host does not wait."""
        if self._combined is None and (self._landed is None or self._landed.is_reached()):
            self._take()

    def read(self) -> Mapping[FlatParamHandle, bytes]:
        """For each flat parameter, which of its parameters got a gradient on any rank of its groups."""
        self.look()
        if self._combined is None and self._landed is not None:
            self._landed.synchronize()
            self._take()
        return self._known

    def _take(self) -> None:
        self._combined = self._own
        for part, handles in self._parts:
            found = bytes(part.tolist())
            self._combined = found[-len(self._own) :]
            start = 0
            for handle in handles:
                stop = start + len(handle.layout.slots)
                # The last group's flags replace those of the groups before.
                self._known[handle] = found[start:stop]
                start = stop

    @property
    def found_nonfinite(self) -> bool:
        """Whether a gradient is not finite, on any rank."""
        self.read()
        return self.looks_at_gradients and self._combined is not None and self._combined[-1] != 0

    def check(self) -> None:
        """Check that all ranks have done the same; every rank calls it in the same place, since it may communicate.

        Raises:
            DivergenceError: on every rank, if the ranks diverge.
        """
        self.read()
        assert self._combined is not None, "it has been read"
        if self._combined[:FLAGS] != self._own[:FLAGS]:
            check_training(self._units)
            check_deeds(self._fingerprint, self._units)
        self._fingerprint.agreed(self._noted)


def compare_gradients(
    units: Sequence[Unit],
    given: Mapping[FlatParamHandle, bytes],
    fingerprint: Fingerprint,
    nonfinite: bool | None = None,
) -> Comparison:
    """Compare across ranks which parameters of every flat parameter got a gradient, and what each rank did.

    Args:
        nonfinite: see `Comparison.begin`.
    """
    handles = (handle for unit in units for handle in unit.handles)
    taking_part = {*given, *(each for each in handles if each not in given and each.exposure.is_trainable)}
    known = {handle: given.get(handle, bytes(len(handle.layout.slots))) for handle in taking_part}
    return Comparison.begin(units, known, fingerprint, nonfinite)


def compare_inference(units: Sequence[Unit], fingerprint: Fingerprint) -> Comparison:
    """Compare across ranks what each rank did in a pass that no backward follows."""
    return Comparison.begin(units, {}, fingerprint)
