"""The record of a rank's failure, as it travels to the other ranks."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs

from flatparam_comm.errors import PeerError, RemoteFailure, cause_among
from flatparam_guard.activity import ACTIVITY

#: The longest message and the longest traceback that travel, in characters; a traceback loses its beginning.
_MESSAGE, _TRACEBACK = 2_000, 8_000
#: The kinds of failures that are no exceptions.
_ENDED: Final = "the end of its process"
_LEFT: Final = "the end of its program"
_UNKNOWN: Final = "an exception"
_DIVERGED: Final = "MismatchError"


def _as_tuple(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(names)


@final
@attrs.frozen
class FailureReport:
    """A failure of `rank`, whose cause is a failure of `culprit`: the same rank, or the one that it waited for.

    Ranks are numbered within the world.
    """

    rank: int
    culprit: int
    kind: str
    """The name of the exception's class."""
    message: str
    where: str = ""
    """The action of the rank: `forward pass of unit 'blocks.1'`."""
    traceback: str = ""
    steps: int | None = None
    """The optimizer steps that the culprit's process had done; None if nobody knows."""
    issued: Mapping[str, int] = attrs.field(factory=dict)
    """The number of collectives that `rank` had issued on each of its groups, by the group's name."""
    failures: Mapping[str, int] = attrs.field(factory=dict)
    """The number of failures of `rank` after that many collectives, by the group's name."""
    is_final: bool = False
    """Whether the process of `rank` ends, so that it will issue no collective any more."""
    diverged: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    """The names of the groups on which ranks diverge, or wait in vain; empty if `rank` has failed otherwise."""

    @classmethod
    def of(cls, rank: int, error: BaseException | None, where: str) -> FailureReport:
        """Return the failure of `rank` by an exception; None if nobody can say which one."""
        if error is None:
            return cls(rank, rank, _UNKNOWN, "its own output shows which one", where, "", ACTIVITY.steps)
        first = cause_among(error, PeerError)
        if first is not None:
            cause = first.cause
            if isinstance(cause, RemoteFailure):
                told = (cause.kind, cause.text, cause.where, cause.remote_traceback, cause.steps)
                return cls(rank, first.rank, *told)
            return cls(rank, first.rank, type(cause).__name__, str(cause))
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        message = str(error)[:_MESSAGE]
        trace = "".join(lines)[-_TRACEBACK:]
        return cls(rank, rank, type(error).__name__, message, where, trace, ACTIVITY.steps)

    @classmethod
    def death(cls, rank: int, message: str) -> FailureReport:
        """Return the end of the process of `rank`, as others have noticed it."""
        return cls(rank, rank, _ENDED, message, is_final=True)

    @classmethod
    def departure(cls, rank: int, message: str) -> FailureReport:
        """Return the end of the program of `rank`, or of its process group, without any failure."""
        return cls(rank, rank, _LEFT, message, is_final=True)

    @classmethod
    def divergence(cls, rank: int, groups: tuple[str, ...], message: str) -> FailureReport:
        """Ranks issue different collectives, so that those of these groups cannot be completed."""
        return cls(rank, rank, _DIVERGED, message, diverged=groups)

    @classmethod
    def from_words(cls, words: dict[str, Any]) -> FailureReport:
        """Return the record that `to_words` has made."""
        return cls(**words)

    def to_words(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return attrs.asdict(self)

    def passed_on_by(self, rank: int) -> FailureReport:
        """Return the failure of `rank`, which has waited for this one."""
        told = (self.kind, self.message, self.where, self.traceback, self.steps)
        return FailureReport(rank, self.culprit, *told)

    @property
    def is_vague(self) -> bool:
        """Whether a later record may say more."""
        return self.kind == _UNKNOWN

    @property
    def is_death(self) -> bool:
        """Whether others have noticed that the process of the rank is gone."""
        return self.kind == _ENDED and not self.is_consequence

    @property
    def is_departure(self) -> bool:
        """Whether the rank has ended its program, or its process group, without an exception."""
        return self.kind == _LEFT

    @property
    def is_consequence(self) -> bool:
        """Whether the rank has failed because another one had."""
        return self.culprit != self.rank

    @property
    def may_go_on(self) -> bool:
        """Whether the program may catch the exception and go on."""
        return not (self.is_consequence or self.is_final or self.diverged)

    def is_of(self, members: Sequence[int]) -> bool:
        """Whether it is a failure of the group with these ranks: they diverge, or the culprit is one of them."""
        return bool(self.diverged) or self.culprit in members

    def as_cause(self) -> RemoteFailure:
        """Return the cause of the errors that other ranks raise."""
        return RemoteFailure(self.kind, self.message, self.where, self.traceback, self.steps)
