"""At the end of a pass: whether every rank has done the same, and which parameters got a gradient anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self, final

from flatparam_comm import Collectives, FlatParamHandle, Mark, ReduceOp, streams_of
from flatparam_runtime.agreement.divergence import (
    DivergenceError,
    check_training,
    first_divergence,
    from_everyone,
    rank_of,
)
from flatparam_runtime.agreement.fingerprint import Fingerprint
from flatparam_runtime.unit.unit import Unit

__all__ = ["Comparison", "compare_gradients", "compare_inference", "groups_of"]

_CPU: Final = torch.device("cpu")


def groups_of(units: Iterable[Unit]) -> Iterator[tuple[Collectives, list[Unit]]]:
    """Every group of more than one rank that `units` shard or replicate over, with the units that use it."""
    by_group: dict[Collectives, list[Unit]] = {}
    for unit in units:
        topology = unit.plan.topology
        for group in (topology.shard, topology.replicate):
            if group is not None and group.size > 1:
                by_group.setdefault(group, []).append(unit)
    yield from by_group.items()


@final
@attrs.define(eq=False)
class _Mask:
    """What a group adds up: a byte for each parameter of `handles`, in order, and the fingerprint's flags."""

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
        """The mask of what is known here and in the masks of the groups `before`."""
        sent = torch.frombuffer(
            bytearray(b"".join([*map(known.__getitem__, handles), own])), dtype=torch.uint8
        )
        flags = streams_of(device).to_device(sent, device)
        for mask in before:
            mask._pass_on(handles, flags, len(own))
        return cls(handles, flags)

    def _pass_on(self, handles: Sequence[FlatParamHandle], flags: Tensor, own: int) -> None:
        mine = dict(
            zip(self.handles, torch.split(self.flags[:-own], self._counts(self.handles)), strict=True)
        )
        for handle, part in zip(handles, torch.split(flags[:-own], self._counts(handles)), strict=True):
            if handle in mine:
                part.copy_(mine[handle])
        flags[-own:].copy_(self.flags[-own:])

    @staticmethod
    def _counts(handles: Sequence[FlatParamHandle]) -> list[int]:
        return [len(handle.layout.slots) for handle in handles]


@final
@attrs.define(eq=False)
class Comparison:
    """What the ranks have told each other at the end of a pass; on an accelerator it is on its way to the host.

    It is one small all-reduce for each group of ranks, in which every rank takes part: it holds a byte for each
    parameter, and the fingerprint of what this rank has done since the last time.
    """

    _units: Sequence[Unit]
    _fingerprint: Fingerprint
    _known: dict[FlatParamHandle, bytes]
    _own: bytes
    _noted: int
    """How many collectives the fingerprint is of."""
    _parts: list[tuple[Tensor, list[FlatParamHandle]]]
    """For each group what comes to the host, and the flat parameters that its flags are of, in order."""
    _landed: Mark
    _combined: bytes | None = None
    """The flags of all fingerprints, once they have been read."""

    @classmethod
    def begin(
        cls, units: Sequence[Unit], known: Mapping[FlatParamHandle, bytes], fingerprint: Fingerprint
    ) -> Self:
        """Tell the other ranks the flags that are `known` here, and the fingerprint."""
        own = fingerprint.flags()
        masks: list[_Mask] = []
        device = next((handle.device for unit in units for handle in unit.handles), _CPU)
        # Nothing that computes waits for it, nor the other way round.
        with streams_of(device).aside() as copies:
            for group, members in groups_of(units):
                handles = [handle for unit in members for handle in unit.handles if handle in known]
                if not masks or handles != masks[-1].handles:
                    masks.append(_Mask.of(device, handles, known, own, masks))
                # A group learns what the one before has seen.
                group.all_reduce(masks[-1].flags, op=ReduceOp.MAX, label="parameters with a gradient").wait()
            parts = [(streams_of(device).to_host(mask.flags), mask.handles) for mask in masks]
        return cls(units, fingerprint, dict(known), own, fingerprint.noted, parts, copies.end)

    def look(self) -> None:
        """Read it if it has come; the host does not wait."""
        if self._combined is None and self._landed.is_reached():
            self._take()

    def read(self) -> Mapping[FlatParamHandle, bytes]:
        """For each flat parameter, which of its parameters got a gradient on any rank of its groups."""
        self.look()
        if self._combined is None:
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
                self._known[handle] = found[start:stop]  # the last group's
                start = stop

    def check(self) -> None:
        """See whether the ranks have all done the same; every rank calls it in the same place, as it may communicate.

        Raises:
            DivergenceError: on every rank, if they have not.
        """
        self.read()
        if self._combined != self._own:
            check_training(self._units)
            deeds = from_everyone(self._units[0].topology, self._fingerprint.deeds(self._units), "order")
            raise DivergenceError(first_divergence(deeds, rank_of(self._units[0].topology)))
        self._fingerprint.agreed(self._noted)


def compare_gradients(
    units: Sequence[Unit], given: Mapping[FlatParamHandle, bytes], fingerprint: Fingerprint
) -> Comparison:
    """Tell the other ranks which parameters of every flat parameter got a gradient here, and what was done."""
    taking_part = {handle for unit in units for handle in unit.trainable} | given.keys()
    known = {handle: given.get(handle, bytes(len(handle.layout.slots))) for handle in taking_part}
    return Comparison.begin(units, known, fingerprint)


def compare_inference(units: Sequence[Unit], fingerprint: Fingerprint) -> Comparison:
    """Tell the other ranks what was done in a pass that no backward follows."""
    return Comparison.begin(units, {}, fingerprint)
