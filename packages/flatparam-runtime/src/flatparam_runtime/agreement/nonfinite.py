"""Gradients that are infinite or not a number: what a tree of units does about them, on every rank alike."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final, Literal, NoReturn, TypeAlias, final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_comm import FlatParamError, FlatParamHandle, owner_of, said_by_ranks
from flatparam_runtime.agreement.fingerprint import Acting

Nonfinite: TypeAlias = Literal["raise", "skip", "ignore"]
"""The consequence of a gradient that is not finite: an error, a step that is left out, or nothing."""
NONFINITE: Final[tuple[Nonfinite, ...]] = ("ignore", "skip", "raise")
"""The possible values, the mildest first."""
#: The gradients of a rank that a message names.
_TOLD: Final = 3


class NonfiniteError(FlatParamError):
    """A gradient is infinite or not a number, on some rank; raised on every rank."""


def check_nonfinite(value: object) -> Nonfinite:
    """`value`, which has to be one of `NONFINITE`.

    Raises:
        ValueError: for anything else.
    """
    for each in NONFINITE:
        if value == each:
            return each
    raise ValueError(f"nonfinite: expected 'raise', 'skip' or 'ignore', found {value!r}")


@final
@attrs.define(eq=False)
class NonfiniteGuard:
    """The guard of a tree whose units do not ignore gradients that are not finite.

    At the end of each backward pass that reduces, each rank looks at all gradients of its shards. One byte in the
    comparison of the ranks says whether any of them found one that is not finite.
    """

    are_there: ClassVar[bool] = False
    """Whether this process has made one, so that optimizers have to be looked at."""
    raises: bool
    """Whether that is an error; otherwise the steps that would use the gradients are left out."""
    found: bool = False
    """Whether the last pass left a gradient that is not finite, on any rank."""
    skipped: int = 0
    """The number of passes after which steps were left out."""
    _rank: int = 0
    """This rank's number among all data-parallel ranks."""
    _told: str = ""
    """The message about the gradients that were found."""
    _is_counted: bool = False
    """Whether the steps after the last pass were counted."""
    _computed: list[tuple[Acting, FlatParamHandle, list[tuple[int, tuple[Tensor, ...]]]]] = attrs.field(factory=list)
    """Of each reduction of the pass: the unit, the flat parameter, and the extremes of this rank's own gradients."""

    @classmethod
    def by(cls, policies: Iterable[Nonfinite]) -> Self | None:
        """Return the guard of a tree by the strictest of its units' policies; None if all ignore such gradients."""
        strictest = max(policies, key=NONFINITE.index)
        if strictest == "ignore":
            return None
        NonfiniteGuard.are_there = True
        return cls(strictest == "raise")

    def look_before_reduction(self, unit: Acting, handles: Iterable[FlatParamHandle]) -> None:
        """Remember how large the gradients are that this rank has computed, to tell later which rank's were not finite.

        Only for an error: it reads as many numbers as the rank has computed. Nothing waits for a device.
        """
        if self.raises:
            for handle in handles:
                found = [(index, _extremes(gradient)) for index, gradient in handle.gradients.arrived()]
                self._computed.append((unit, handle, found))

    def look(self, units: Iterable[Acting], held: Iterable[Tensor]) -> bool:
        """Return whether a gradient of this rank's shards, or one of `held`, is not finite; waits for a device.

        The ranks of tensor parallelism agree.
        """
        handles = [handle for unit in units for handle in unit.handles]
        given = [p.grad for handle in handles for p in handle.exposure.parameters() if p.grad is not None]
        found = not all(_are_finite(_extremes(each)) for each in (*given, *held))
        meshes = next(filter(None, (handle.forms.meshes for handle in handles)), None)
        return found if meshes is None else bool(meshes.agree(handles, found))

    def judge(self, units: Sequence[Acting], found: bool) -> None:
        """Take the ranks' verdict over the pass that ends; `found` is the same on all of them.

        Raises:
            NonfiniteError: on every rank, if the policy is to raise.
        """
        computed, self._computed = self._computed, []
        self.found, self._is_counted = found, False
        if not found or (self.skipped and not self.raises):
            return
        origins = [
            _name_of(unit, handle, index)
            for unit, handle, gradients in computed
            for index, extremes in gradients
            if not _are_finite(extremes)
        ]
        topology = units[0].topology
        self._rank = topology.rank
        reduced = [name for unit in units for name in nonfinite_names(unit)]
        # The gradients of parameters that wait for those of other ranks are given by now.
        everyone = topology.exchange((origins[:_TOLD], reduced[:_TOLD]), label="not finite")
        told = said_by_ranks(
            [(rank, f"has computed that of {', '.join(names)}") for rank, (names, _) in enumerate(everyone) if names]
        ) or said_by_ranks(
            [(rank, f"has the sum of {', '.join(names)}") for rank, (_, names) in enumerate(everyone) if names]
        )
        self._told = f"gradients are infinite or not a number: {told}"
        if self.raises:
            self._raise()

    def drop(self) -> None:
        """Forget the pass that an exception has interrupted."""
        self._computed = []

    def leave_out(self) -> None:
        """Count the steps after the pass once, and warn of the first.

        Raises:
            NonfiniteError: if the policy is to raise, since the program has caught that error and goes on.
        """
        if self.raises:
            self._raise()
        if self._is_counted:
            return
        self._is_counted = True
        self.skipped += 1
        if self.skipped == 1:
            warnings.warn(
                f"nonfinite='skip' leaves out a step on all ranks: {self._told} (further ones are only counted: see "
                "skipped_steps)",
                stacklevel=4,
            )

    def _raise(self) -> NoReturn:
        raise NonfiniteError(
            f"rank {self._rank}: {self._told}; no parameter and no optimizer has changed: look at that "
            "rank's batch and loss, call zero_grad() before going on, or pass nonfinite='skip'"
        )


def nonfinite_names(unit: Acting) -> Iterator[str]:
    """Yield the names of the unit's parameters of which this rank has a gradient that is not finite."""
    for handle in unit.handles:
        for parameter in handle.exposure.parameters():
            if parameter.grad is None or bool(torch.isfinite(parameter.grad).all()):
                continue
            owner = owner_of(parameter)
            if owner is not None:
                yield _name_of(unit, handle, owner[1])
                continue
            for fragment in handle.layout.fragments(unit.topology.shard.rank):
                part = parameter.grad[fragment.in_shard.start : fragment.in_shard.stop]
                if not bool(torch.isfinite(part).all()):
                    yield _name_of(unit, handle, fragment.index)


def _name_of(unit: Acting, handle: FlatParamHandle, index: int) -> str:
    prefix = "" if unit.name == "(root)" else f"{unit.name}."
    return repr(prefix + handle.layout.fqns[index])


def _extremes(tensor: Tensor) -> tuple[Tensor, ...]:
    """The least and the greatest element; one of them is not finite exactly if some element is not. Takes no memory."""
    if not tensor.numel():
        return ()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tuple(torch.aminmax(tensor.detach()))


def _are_finite(numbers: Iterable[Tensor]) -> bool:
    return all(math.isfinite(number.item()) for number in numbers)
