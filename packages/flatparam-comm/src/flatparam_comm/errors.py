"""Errors between ranks, and what messages say of many ranks.

A mistake in the arguments of one call is a plain `ValueError`; these classes are for errors that involve several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar


class CommError(RuntimeError):
    """Catch this to catch every error of this package that is not a mistake in one call's arguments."""


class CollectiveError(CommError):
    """Catch this if a collective could not be completed on this rank.

    `rank` is the rank (within its group) that the error is about, `op` the collective's name, `label` the caller's own
    name for it (`""` if none was given). The engine's own exception, if there is one, is `__cause__`.
    """

    def __init__(self, rank: int, op: str, label: str, message: str) -> None:
        """`message` says what was expected and found, and what to do; rank and call are put before it."""
        super().__init__(rank, op, label, message)
        self.rank = rank
        self.op = op
        self.label = label
        self.message = message

    def __str__(self) -> str:
        return f"rank {self.rank}: {describe_call(self.op, self.label)}: {self.message}"


class MismatchError(CollectiveError):
    """Catch this if ranks diverge (n-th calls differ in op, numel, dtype, reduction or root); raised on every rank."""


class DeadlockError(CollectiveError):
    """Catch this when every rank waits for something that can never happen; raised on every rank, naming each wait."""


class PeerError(CollectiveError):
    """Catch this when a collective cannot complete because another rank failed first.

    `rank` is the rank that failed and `cause` its exception; `waiting_rank` is the one that this error was raised on.
    Ranks are numbered within the world here, since the one that failed need not be in the waiting rank's group.
    """

    def __init__(
        self,
        rank: int,
        cause: BaseException,
        *,
        waiting_rank: int = -1,
        op: str = "",
        label: str = "",
        prefix: str = "",
    ) -> None:
        """`op` and `label` are those of the collective that `waiting_rank` waits for; `prefix` begins the message."""
        told = str(cause) if isinstance(cause, RemoteFailure) else f"with {type(cause).__name__}: {cause}"
        super().__init__(rank, op, label, f"{prefix}rank {rank} failed first {told}")
        self.cause = cause
        self.waiting_rank = waiting_rank
        self.prefix = prefix
        self.__cause__ = cause

    def __str__(self) -> str:
        return f"rank {self.waiting_rank}: {describe_call(self.op, self.label)}: {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_peer_error, (self.rank, self.cause, self.waiting_rank, self.op, self.label, self.prefix)


class RemoteFailure(CommError):
    """The failure of a rank in another process: the cause of the `PeerError` that the other ranks raise.

    `kind` is the name of the exception's class, `text` its message, `where` what the rank was doing (`""` if nobody
    knows), `remote_traceback` the traceback as text, and `steps` the optimizer steps that its process had done (None if
    nobody knows).
    """

    def __init__(
        self, kind: str, text: str, where: str = "", remote_traceback: str = "", steps: int | None = None
    ) -> None:
        """The parts of the message, as the failing rank has told them."""
        super().__init__(kind, text, where, remote_traceback, steps)
        self.kind = kind
        self.text = text
        self.where = where
        self.remote_traceback = remote_traceback
        self.steps = steps

    def __str__(self) -> str:
        place = f"in {self.where} " if self.where else ""
        when = "" if self.steps is None else f"{told_steps(self.steps)} "
        return f"{place}{when}with {self.kind}: {self.text}"


class RankError(CommError):
    """Catch this when the function that a world of ranks ran has failed.

    `rank` is the lowest rank that failed by itself, not because another rank had. Its exception is `__cause__` if the
    ranks were threads; `remote_traceback` is its text if they were processes.
    """

    def __init__(self, rank: int, message: str, remote_traceback: str = "") -> None:
        """`message` is the whole first line; `remote_traceback` follows it."""
        super().__init__(rank, message, remote_traceback)
        self.rank = rank
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"{self.message}\n{self.remote_traceback}" if self.remote_traceback else self.message


class RankDied(RankError):
    """Catch this when a rank's process ended without a result; `signal` names the signal that killed it, or is `""`."""

    def __init__(self, rank: int, message: str, exitcode: int, signal: str) -> None:
        """`exitcode` is the process's own: negative for a signal."""
        super().__init__(rank, message)
        self.args = (rank, message, exitcode, signal)
        self.exitcode = exitcode
        self.signal = signal


class WorldTimeout(CommError, TimeoutError):
    """Catch this when a world of ranks was not done in time; the message says where each unfinished rank was."""


E = TypeVar("E", bound=BaseException)


def cause_among(error: BaseException, *kinds: type[E]) -> E | None:
    """Return the first of `error`, what has led to it, and so on, that is one of `kinds`; None if none is."""
    # A program may have made a circle.
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, kinds):
            return link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None


def describe_call(op: str, label: str) -> str:
    """Return the name of a collective in every message of this package: `all_gather 'layers.0'`."""
    return f"{op} {label!r}" if label else op


def told_steps(steps: int) -> str:
    """Return the optimizer steps that a process has done, as in `after 12 optimizer steps`."""
    if steps == 0:
        return "before the first optimizer step"
    return f"after {steps:,} optimizer step{'' if steps == 1 else 's'}"


def _rebuild_peer_error(
    rank: int, cause: BaseException, waiting_rank: int, op: str, label: str, prefix: str
) -> PeerError:
    """Return an unpickled `PeerError` (its constructor has keyword-only arguments, which pickle cannot pass)."""
    return PeerError(rank, cause, waiting_rank=waiting_rank, op=op, label=label, prefix=prefix)


#: Ranks in a row that are written as a range, and ranks that say the same which become one entry.
_MANY: Final = 5
#: The entries of a message; the ranks of the others are counted.
_ENTRIES: Final = 8
#: What becomes of the verb if several ranks do it.
_PLURALS: Final = (("waits ", "wait "), ("has ", "have "), ("is ", "are "), ("was ", "were "), ("trains ", "train "))


def told_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks, in order: `[0, 1]`, or with ranges `[0-54, 56-63]`."""
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    parts = [[f"{row[0]}-{row[-1]}"] if len(row) >= _MANY else map(str, row) for row in rows]
    return f"[{', '.join(part for row in parts for part in row)}]"


def said_by_ranks(said: Sequence[tuple[int, str]]) -> str:
    """Return the deeds of the ranks in words: `rank 0 waits for ...; rank 1 has finished`; equal ones are one entry."""
    return "; ".join(_entries(said))


def told_by_ranks(claim: str, said: Sequence[tuple[int, str]], advice: str = "") -> str:
    """Return a message about several ranks: a claim, the deeds of the ranks, and what to do.

    With few ranks it is one line, `claim: rank 0 ...; rank 1 ...; advice`. With many, each entry has its own line.
    """
    entries = _entries(said)
    if len(said) < _MANY:
        return "; ".join([f"{claim}: {'; '.join(entries)}", *([advice] if advice else [])])
    return "\n".join([f"{claim}:", *(f"  {entry}" for entry in entries), *([advice] if advice else [])])


def _entries(said: Sequence[tuple[int, str]]) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank, text in said:
        by_text.setdefault(text, []).append(rank)
    entries: list[tuple[int, str]] = []
    for text, ranks in by_text.items():
        if len(ranks) >= _MANY:
            plural = next((text.replace(one, many, 1) for one, many in _PLURALS if text.startswith(one)), text)
            entries.append((ranks[0], f"ranks {told_ranks(ranks)[1:-1]} {plural}"))
        else:
            entries += [(rank, f"rank {rank} {text}") for rank in ranks]
    texts = [text for _, text in sorted(entries)]
    if len(texts) > _ENTRIES + 1:
        left_out = len(texts) - _ENTRIES
        texts[_ENTRIES:] = [f"{left_out} more, which differ from these"]
    return texts
