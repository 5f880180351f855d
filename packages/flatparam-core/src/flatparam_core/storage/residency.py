"""State machines as tables; and the one that says which parts of a flat parameter are in memory."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, Generic, TypeVar, final

import attrs

from flatparam_core.errors import IllegalStepError

S = TypeVar("S", bound=enum.Enum)


@final
@attrs.frozen(eq=False)
class Transitions(Generic[S]):
    """The legal steps of one kind of state, for example the residency of a flat parameter."""

    noun: str
    steps: Mapping[S, frozenset[S]]

    def move(self, current: S, target: S, *, who: object) -> S:
        """Return `target` if the step from `current` is legal; `str(who)` names the object in the message.

        Raises:
            IllegalStepError: if it is not; the message names both ends, the object and the legal steps.
        """
        if target not in self.steps[current]:
            legal = ", ".join(sorted(state.name for state in self.steps[current])) or "nothing"
            raise IllegalStepError(
                f"{who}: {self.noun} cannot go from {current.name} to {target.name}; "
                f"from {current.name} it can go to {legal}"
            )
        return target


class Residency(enum.Enum):
    """The parts of a flat parameter that are in memory on this rank."""

    SHARDED = "the shard"
    UNSHARDING = "the shard, and a full buffer that is being filled"
    UNSHARDED = "the shard, and the full parameters, which the module shows"

    # Enum's own hash is written in Python, and a table is looked up at every step.
    __hash__ = object.__hash__


RESIDENCY: Final = Transitions(
    "residency",
    {
        Residency.SHARDED: frozenset({Residency.UNSHARDING}),
        Residency.UNSHARDING: frozenset({Residency.UNSHARDED, Residency.SHARDED}),
        Residency.UNSHARDED: frozenset({Residency.SHARDED}),
    },
)
