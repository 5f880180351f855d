"""State machines as tables: the legal steps are data, and one method checks a step."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar, final

import attrs

from flatparam_core.errors import IllegalStepError

__all__ = ["Transitions"]

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
