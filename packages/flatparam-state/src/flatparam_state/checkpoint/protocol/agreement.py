"""One verdict on all ranks: if one has failed, every one raises the same error."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import attrs
from typing_extensions import Self

from flatparam_runtime import ExchangesValues
from flatparam_state.files import CheckpointError, free_nbytes

__all__ = ["Attempt", "Failure", "agree", "attempt", "check_one_directory"]

T = TypeVar("T")


@final
@attrs.frozen
class Failure:
    """A failure of one rank, as all ranks will be told."""

    rank: int
    text: str
    path: str | None = None
    fqn: str | None = None
    hint: str = ""
    about: int | None = None
    """The rank whose file or value it is, if that is a different rank."""

    @classmethod
    def of(cls, error: Exception, rank: int, *, directory: Path | None = None, need: int = 0) -> Self:
        """The failure of `rank` by `error`, which came while the rank wrote `need` bytes to `directory`, if it did."""
        if isinstance(error, CheckpointError):
            return cls(rank, error.message, error.path, error.fqn, error.hint, error.rank)
        if isinstance(error, OSError):
            path = error.filename or (directory and str(directory))
            text = f"{path}: {error.strerror or error}"
            hint = "nothing was changed"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and directory is not None:
                text += f": this rank needs {need:,} bytes, and {free_nbytes(directory):,} are free"
                hint = "free space, or keep fewer checkpoints; the checkpoints before are as they were"
            return cls(rank, text, None if path is None else str(path), hint=hint)
        return cls(rank, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def error(self) -> CheckpointError:
        """The error that every rank raises."""
        about = self.rank if self.about is None else self.about
        return CheckpointError(
            f"rank {self.rank}: {self.text}", rank=about, path=self.path, fqn=self.fqn, hint=self.hint
        )


@final
@attrs.frozen(eq=False)
class Attempt(Generic[T]):
    """Something that a rank has tried: its value, or how it failed and the exception that was the cause."""

    value: T | None = None
    failure: Failure | None = None
    cause: Exception | None = None


def attempt(
    action: Callable[[], T], rank: int, *, directory: Path | None = None, need: int = 0
) -> Attempt[T]:
    """Try `action` on `rank`; see `Failure.of`."""
    try:
        return Attempt(action())
    except Exception as error:
        return Attempt(failure=Failure.of(error, rank, directory=directory, need=need), cause=error)


def agree(ranks: ExchangesValues, attempted: Attempt[Any], fact: Any = None, *, label: str) -> list[Any]:
    """The `fact` of every rank, if none has failed in what it has `attempted`.

    Raises:
        CheckpointError: on every rank, that of the lowest rank that has failed by itself; its cause is known there.
    """
    answers = ranks.exchange((attempted.failure, fact), label=label)
    failures = [failed for failed, _ in answers if failed is not None]
    for failed in sorted(failures, key=lambda each: each.about not in (None, each.rank)):
        raise failed.error() from (attempted.cause if failed.rank == ranks.rank else None)
    return [fact for _, fact in answers]


def check_one_directory(names: Sequence[tuple[str, str]]) -> None:
    """Refuse different directories; `names` has the two names of that of each rank, of which one has to be the same.

    Raises:
        CheckpointError: on every rank.
    """
    for rank, (named, real) in enumerate(names):
        if named != names[0][0] and real != names[0][1]:
            raise CheckpointError(
                f"rank {rank}: expected the directory of rank 0, {names[0][0]}, found {named}",
                rank=rank,
                path=named,
                hint="give every rank one directory; if its name comes from a clock, have rank 0 make it and broadcast "
                "it; nothing was changed",
            )
