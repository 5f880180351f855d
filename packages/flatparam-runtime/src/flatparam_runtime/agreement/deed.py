"""The actions of a rank that have to be the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Literal, Protocol, TypeAlias, final

import attrs

from flatparam_comm import FlatParamHandle, Topology

DeedKind: TypeAlias = Literal["step", "gather", "reduce", "train"]


class Acting(Protocol):
    """Anything that issues collectives, as a unit does."""

    @property
    def name(self) -> str:
        """The name in messages."""

    @property
    def handles(self) -> Sequence[FlatParamHandle]:
        """The flat parameters that it gathers and reduces."""

    @property
    def topology(self) -> Topology:
        """The ranks that take part in its collectives."""


@final
@attrs.frozen
class Deed:
    """One collective of one unit, a change of the parameters that the unit trains, or what is done between passes.

    `nbytes` is the size of the full parameters or gradients; for a change, it is a checksum of what is trained from
    now on, and for a step, or anything else between passes, one of its description.
    """

    kind: DeedKind
    unit: str
    nbytes: int
    parameters: tuple[str, ...]
    """The names of the first few parameters in the unit; for a step, its description."""
    everywhere: bool = True
    """Whether every rank is to do it; otherwise a rank may have nothing to do it with."""

    @classmethod
    def of(cls, kind: DeedKind, unit: Acting, nbytes: int) -> Deed:
        """Return the deed of `unit`."""
        fqns = (fqn for handle in unit.handles for fqn in handle.layout.fqns)
        return cls(kind, unit.name, nbytes, tuple(islice(fqns, 3)))

    def __str__(self) -> str:
        if self.kind == "step":
            return self.parameters[0]
        names = ", ".join(self.parameters[:2]) + (", ..." if len(self.parameters) > 2 else "")
        if self.kind == "train":
            return f"change of requires_grad in unit {self.unit!r} ({names})"
        return f"{self.kind} of unit {self.unit!r} ({names}; {self.nbytes:,} bytes)"
