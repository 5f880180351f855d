"""One verdict on all ranks: if one has failed, every one raises the same error."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, final

import attrs
from typing_extensions import Self

from flatparam_files import CheckpointError
from flatparam_files.disk.system import free_nbytes
from flatparam_runtime import ExchangesValues
from flatparam_state.ranks import CALL, differing

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
    is_interrupt: bool = False
    """Whether it is no `Exception`, such as `KeyboardInterrupt`: the rank raises that itself."""

    @classmethod
    def of(cls, error: BaseException, rank: int, *, directory: Path | None = None, need: int = 0) -> Self:
        """The failure of `rank` by `error`, which came while the rank wrote `need` bytes to `directory`, if it did."""
        if isinstance(error, CheckpointError):
            return cls(rank, error.message, error.path, error.fqn, error.hint, error.rank)
        if isinstance(error, OSError):
            path = error.filename or (directory and str(directory))
            text = f"{path}: {error.strerror or error}"
            hint = "nothing was changed"
            needs = f": this rank needs {need:,} bytes" if need else ""
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and directory is not None:
                free = free_nbytes(directory)
                text += f"{needs}, and {free:,} are free" if needs else f": {free:,} bytes are free"
                hint = "free space, or keep fewer checkpoints; the checkpoints before are as they were"
            elif error.errno == errno.EFBIG:
                text += needs
                hint = "let this process write longer files (ulimit -f); the checkpoints before are as they were"
            return cls(rank, text, None if path is None else str(path), hint=hint)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return cls(rank, text, is_interrupt=not isinstance(error, Exception))

    def error(self) -> CheckpointError:
        """Return the error that every rank raises."""
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
    cause: BaseException | None = None


def some_of(names: Sequence[str], most: int = 10) -> str:
    """Return at most so many of `names` in words, and the number of the others."""
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def attempt(action: Callable[[], T], rank: int, *, directory: Path | None = None, need: int = 0) -> Attempt[T]:
    """Try `action` on `rank`; see `Failure.of`. What interrupts it is caught, too, since the others have to know."""
    try:
        return Attempt(action())
    except BaseException as error:
        return Attempt(failure=Failure.of(error, rank, directory=directory, need=need), cause=error)


def agree(ranks: ExchangesValues, attempted: Attempt[Any], fact: Any = None, *, label: str) -> list[Any]:
    """Return the `fact` of every rank, if none has failed in what it has `attempted`; see `raise_first`."""
    answers = ranks.exchange((attempted.failure, fact), label=label)
    failures = [failed for failed, _ in answers if failed is not None]
    if failures:
        raise_first(failures, attempted)
    return [fact for _, fact in answers]


def raise_first(failures: Sequence[Failure], attempted: Attempt[Any]) -> NoReturn:
    """Raise one of the `failures` of the ranks, the same on all; a rank that was interrupted raises that again.

    Raises:
        CheckpointError: that of an interrupted rank, else of the lowest rank that has failed by itself; its cause is
            known there.
    """
    own = attempted.failure
    if own is not None and own.is_interrupt and attempted.cause is not None:
        raise attempted.cause
    first = min(failures, key=lambda each: (not each.is_interrupt, each.about not in (None, each.rank)))
    raise first.error() from (attempted.cause if own is not None and own.rank == first.rank else None)


def raise_told(texts: Sequence[str], cause: BaseException | None, *, path: Path | None = None, hint: str = "") -> None:
    """Raise what the first rank that has a text says, as a CheckpointError on every rank; `cause` is this rank's."""
    for rank, text in enumerate(texts):
        if text:
            raise CheckpointError(f"rank {rank}: {text}", rank=rank, path=path, hint=hint) from cause


def agree_on_call(
    ranks: ExchangesValues,
    names: tuple[str, str],
    call: str,
    arguments: Mapping[str, object],
    check: Callable[[], object],
) -> None:
    """Have all ranks make one call with the same arguments.

    Args:
        names: those of this rank's directory; see `check_one_directory`.
        call: the name of the method.
        arguments: by name, those that have to be the same on all ranks.
        check: raises if this rank cannot begin the call.

    Raises:
        CheckpointError: on every rank, saying what each rank asks for; or if `check` has failed on one.
        ValueError: on a rank whose `check` has raised it.
    """
    attempted = attempt(check, ranks.rank)
    try:
        told = agree(ranks, attempted, (names, {CALL: call, **arguments}), label="compare the calls")
    except CheckpointError:
        if isinstance(attempted.cause, ValueError):
            raise attempted.cause from None
        raise
    check_one_directory([names for names, _ in told])
    found = differing([each for _, each in told])
    if found is not None:
        raise CheckpointError(
            f"rank {found.rank}: {names[0]}: {found.words}",
            rank=found.rank,
            path=names[0],
            hint="have every rank make the same call with the same arguments; nothing was changed",
        )


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
