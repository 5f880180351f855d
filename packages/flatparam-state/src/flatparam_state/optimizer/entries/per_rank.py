"""States that differ between ranks and are not cut like their parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard, final

import attrs
from typing_extensions import Self

from flatparam_runtime import Span

__all__ = ["PER_RANK", "PerRank", "is_per_rank"]

PER_RANK: Final = "flatparam.per_rank"
"""The one key of the entry that a state dict has for a `PerRank`: a list of what each rank that holds a part of the
parameter has, `{"interval": [start, stop], "value": ...}`."""


@final
@attrs.frozen(eq=False)
class PerRank:
    """A state that differs between ranks and is not cut like its parameter, and so has a value for each rank.

    The state dict has it as the entry `{PER_RANK: [...]}`, the manifest of a checkpoint as one `RankValue` a rank.
    """

    values: tuple[tuple[Span, Any], ...]
    """The part of the parameter that a rank holds, and its value."""

    def to_entry(self) -> dict[str, Any]:
        """Return the entry of a state dict; see `PER_RANK`."""
        return {
            PER_RANK: [{"interval": [part.start, part.stop], "value": value} for part, value in self.values]
        }

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Self:
        """Return the state of which `to_entry` made `entry`."""
        return cls(tuple((Span(*each["interval"]), each["value"]) for each in entry[PER_RANK]))


def is_per_rank(entry: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether an entry of a state dict is that of a `PerRank`."""
    return isinstance(entry, Mapping) and PER_RANK in entry
