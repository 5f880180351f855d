"""Errors: families, texts, and that they survive being sent to another process."""

from __future__ import annotations

import pickle

from each_row import each_row

from flatparam_comm import (
    CollectiveError,
    CommError,
    DeadlockError,
    MismatchError,
    PeerError,
    RankDied,
    RankError,
    WorldTimeout,
)

ERRORS = [
    CollectiveError(1, "all_gather", "layers.0", "it broke"),
    MismatchError(1, "all_gather", "", "they differ"),
    DeadlockError(0, "barrier", "end", "nobody can go on"),
    PeerError(2, ValueError("mine"), waiting_rank=1, op="barrier", label="end"),
    RankError(3, "rank 3 failed", "Traceback..."),
    RankDied(3, "rank 3 was killed", -9, "SIGKILL"),
    WorldTimeout("too late"),
]


@each_row("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: CommError) -> None:
    """Every error has the same text and fields after pickle, so it can come out of a worker process."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    for name in ("rank", "op", "label", "waiting_rank", "remote_traceback", "exitcode", "signal"):
        assert getattr(copy, name, None) == getattr(error, name, None)


@each_row("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_are_one_family(error: CommError) -> None:
    """CommError catches all of them."""
    assert isinstance(error, CommError)
    assert isinstance(error, RuntimeError)


def test_a_collectives_error_names_rank_call_and_label() -> None:
    """The text begins with the rank and the call; a call without a label is named without one."""
    assert str(ERRORS[0]) == "rank 1: all_gather 'layers.0': it broke"
    assert str(ERRORS[1]) == "rank 1: all_gather: they differ"


def test_a_peer_error_names_both_ranks() -> None:
    """A PeerError is about the rank that failed, and says on which rank and in which call it was noticed."""
    error = ERRORS[3]
    assert isinstance(error, PeerError)
    assert (error.rank, error.waiting_rank) == (2, 1)
    assert str(error) == "rank 1: barrier 'end': rank 2 failed first with ValueError: mine"
    assert error.__cause__ is error.cause
