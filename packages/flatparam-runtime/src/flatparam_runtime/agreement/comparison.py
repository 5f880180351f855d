"""What ranks compare, so that no two of them train different programs in silence."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import attrs
import torch
from torch import Tensor
from typing_extensions import Self, final

from flatparam_comm import Collectives, FlatParamError, FlatParamHandle, Mark, ReduceOp, Topology, streams_of
from flatparam_runtime.agreement.fingerprint import Deed, Fingerprint
from flatparam_runtime.unit.unit import Unit

__all__ = [
    "Comparison",
    "DivergenceError",
    "agree_on_deed",
    "agree_on_units",
    "compare_gradients",
    "compare_inference",
    "groups_of",
]

T = TypeVar("T")
_CPU: Final = torch.device("cpu")


class DivergenceError(FlatParamError):
    """The ranks are not running the same model or the same program; raised on every rank."""


def groups_of(units: Iterable[Unit]) -> Iterator[tuple[Collectives, list[Unit]]]:
    """Every group of more than one rank that `units` shard or replicate over, with the units that use it."""
    by_group: dict[Collectives, list[Unit]] = {}
    for unit in units:
        topology = unit.plan.topology
        for group in (topology.shard, topology.replicate):
            if group is not None and group.size > 1:
                by_group.setdefault(group, []).append(unit)
    yield from by_group.items()


# Before the first pass: the same units?


@final
@attrs.frozen
class _Fact:
    """One thing that must be the same on every rank: about what, and its value."""

    about: str
    value: str


def _everyone(topology: Topology, value: T, label: str) -> list[T]:
    """The `value` of every data-parallel rank, in rank order, replica by replica."""
    known = [value]
    for group in (topology.shard, topology.replicate):
        if group is not None and group.size > 1:
            known = [item for items in group.exchange(known, label=label) for item in items]
    return known


def _rank(topology: Topology) -> int:
    return topology.shard.rank + topology.shard.size * (topology.replicate.rank if topology.replicate else 0)


def agree_on_units(units: Sequence[Unit]) -> None:
    """Check that every rank has the same units with the same parameters and plans; warn of other weights.

    Raises:
        DivergenceError: on every rank, naming the first difference and what each rank has.
    """
    facts = [fact for unit in units for fact in _facts(unit)]
    weights = _initial_weights(units)
    for unit in units:
        unit.held.forget_initial()
    root = units[0].topology
    everyone = _everyone(root, (_digest(facts), _digest(weights)), "units")
    if len({digest for digest, _ in everyone}) > 1:
        raise DivergenceError(_first_difference(_everyone(root, facts, "units"), _rank(root)))
    if len({digest for _, digest in everyone}) > 1:
        _warn_of_weights(_everyone(root, weights, "initial weights"))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _initial_weights(units: Sequence[Unit]) -> dict[str, int]:
    """The checksums of the parameters that are as they were when they were sharded, by what a message calls them."""
    found = {}
    for unit in units:
        weights = unit.held.initial
        if weights is not None and unit.stamp() == weights.stamp:
            for fqn, checksum in weights.checksums().items():
                found[f"parameter {fqn!r} of unit {unit.name!r}"] = checksum
    return found


def _warn_of_weights(everyone: Sequence[Mapping[str, int]]) -> None:
    about = next(
        name
        for name in dict.fromkeys(name for found in everyone for name in found)
        if len({found.get(name) for found in everyone}) > 1
    )
    first = everyone[0].get(about)
    others = [rank for rank, found in enumerate(everyone) if found.get(about) != first]
    warnings.warn(
        f"the ranks begin with different weights: {about} has other values on ranks {others} than on rank 0, so what "
        "is trained is a mixture; seed all ranks alike, load the same state on all, or pass sync_module_states=True",
        stacklevel=2,
    )


def _facts(unit: Unit) -> Iterator[_Fact]:
    plan = unit.plan
    who = f"unit {unit.name!r}"
    yield _Fact(who, f"{len(unit.handles)} flat parameters")
    yield _Fact(f"the sharding strategy of {who}", f"free after forward: {plan.free_after_forward}")
    yield _Fact(f"the groups of {who}", f"{plan.topology.shard.size} ranks share the parameters")
    yield _Fact(f"the mixed precision of {who}", str(plan.precision))
    yield _Fact(f"use_orig_params of {who}", str(plan.use_orig_params))
    for handle in unit.handles:
        for slot, trained in zip(handle.layout.slots, handle.exposure.requires_grad(), strict=True):
            spec = slot.spec
            how = "trained" if trained else "frozen"
            yield _Fact(f"parameter {spec.fqn!r} of {who}", f"shape {spec.shape}, {spec.dtype}, {how}")


def _first_difference(everyone: Sequence[Sequence[_Fact]], rank: int) -> str:
    place = next(
        i for i in range(max(map(len, everyone)) + 1) if len({_at(facts, i) for facts in everyone}) > 1
    )
    told = "; ".join(f"rank {r} has {_told(_at(facts, place))}" for r, facts in enumerate(everyone))
    return (
        f"rank {rank}: the ranks have different models: {told}; build, wrap and configure the model in the same way on "
        "every rank"
    )


def _at(facts: Sequence[_Fact], place: int) -> _Fact | None:
    return facts[place] if place < len(facts) else None


def _told(fact: _Fact | None) -> str:
    return "no more parameters" if fact is None else f"{fact.about}: {fact.value}"


# During the first pass: the same next collective?


def agree_on_deed(topology: Topology, deed: Deed) -> None:
    """Check, before a collective of a unit over `topology`, that every rank is about to do the same one.

    Raises:
        DivergenceError: on every rank, naming the units and parameters that each is at.
    """
    everyone = _everyone(topology, deed, "order")
    if any(other != deed for other in everyone):
        raise DivergenceError(_different_deeds(everyone, _rank(topology)))


def _different_deeds(everyone: Sequence[Deed | None], rank: int) -> str:
    told = "; ".join(
        f"rank {r} was at {'the end of its pass' if deed is None else f'the {deed}'}"
        for r, deed in enumerate(everyone)
    )
    return (
        f"rank {rank}: the ranks run different units: {told}; every rank must call the same units in the same order "
        "(guard data-dependent branches so that all ranks take the same one)"
    )


# At the end of a pass: the same collectives, and which gradients?


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
            _check_training(self._units)
            deeds = _everyone(self._units[0].topology, self._fingerprint.deeds(self._units), "order")
            raise DivergenceError(_first_divergence(deeds, _rank(self._units[0].topology)))
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


def _check_training(units: Sequence[Unit]) -> None:
    """Raise DivergenceError, on every rank, if the ranks train different parameters, naming the first."""
    handles = [(unit, handle) for unit in units for handle in unit.handles]
    everyone = _everyone(
        units[0].topology, [bytes(handle.trained) for _, handle in handles], "what is trained"
    )
    for (unit, handle), rows in zip(handles, zip(*everyone, strict=True), strict=True):
        for fqn, flags in zip(handle.layout.fqns, zip(*rows, strict=True), strict=True):
            if len(set(flags)) > 1:
                told = "; ".join(
                    f"rank {r} {'trains' if on else 'has frozen'} it" for r, on in enumerate(flags)
                )
                raise DivergenceError(
                    f"rank {_rank(unit.topology)}: parameter {fqn!r} of unit {unit.name!r} is not trained on all "
                    f"ranks: {told}; set requires_grad in the same way on every rank"
                )


def _first_divergence(everyone: Sequence[Sequence[Deed]], rank: int) -> str:
    places = range(max(map(len, everyone)) + 1)
    for place in places:
        deeds = [deeds[place] if place < len(deeds) else None for deeds in everyone]
        if any(deed != deeds[0] for deed in deeds):
            return _different_deeds(deeds, rank)
    return f"rank {rank}: the ranks have run different units since the last step; restart from a checkpoint"
