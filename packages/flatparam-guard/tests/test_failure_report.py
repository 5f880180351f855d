"""The record of a failure: what of an exception travels to the other ranks."""

from __future__ import annotations

import json

import pytest
from each_row import each_row

from flatparam_comm import PeerError, RemoteFailure
from flatparam_guard.activity import ACTIVITY
from flatparam_guard.failure import FailureReport


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The exception as it is when it has been raised, maybe from a different one."""
    try:
        raise error from cause
    except BaseException as found:
        return found


def test_an_exception_of_the_ranks_own() -> None:
    """Class, message, place and traceback travel; a long message loses its end, and a long traceback its beginning."""
    report = FailureReport.of(3, raised(ValueError("x" * 9000)), "the loss")
    assert (report.rank, report.culprit, report.kind, report.where) == (3, 3, "ValueError", "the loss")
    assert report.message == "x" * 2000
    assert len(report.traceback) == 8000
    assert report.may_go_on
    assert not report.is_consequence
    cause = report.as_cause()
    assert (cause.kind, cause.text, cause.where) == ("ValueError", report.message, "the loss")


def test_an_exception_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that autograd freed has failed with an exception that only its own rank can show."""
    monkeypatch.setattr(ACTIVITY, "steps", 0)
    report = FailureReport.of(1, None, "backward pass")
    assert report.is_vague
    told = "in backward pass before the first optimizer step with an exception: its own output shows which one"
    assert str(report.as_cause()) == told


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (0, "before the first optimizer step"),
        (1, "after 1 optimizer step"),
        (12_000, "after 12,000 optimizer steps"),
    ],
)
def test_the_optimizer_steps_that_were_done(steps: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure says after how many steps of its process it came, also when a rank passes it on."""
    monkeypatch.setattr(ACTIVITY, "steps", steps)
    report = FailureReport.of(1, ValueError("x"), "the loss")
    monkeypatch.setattr(ACTIVITY, "steps", 99)
    assert str(report.as_cause()) == f"in the loss {told} with ValueError: x"
    assert str(report.passed_on_by(0).as_cause()) == str(report.as_cause())
    consequence = FailureReport.of(0, raised(PeerError(1, report.as_cause())), "")
    assert str(consequence.as_cause()) == str(report.as_cause())


@each_row("depth", [0, 1, 5])
def test_a_failure_that_another_rank_began(depth: int) -> None:
    """If the rank failed since it had waited for a different one, that one is the culprit, through any chain of causes."""
    remote = RemoteFailure("KeyError", "'a'", "forward pass of unit 'blocks.1'", "Traceback ...")
    error: BaseException = raised(PeerError(2, remote, waiting_rank=0, op="all_gather", label="blocks.1"))
    for number in range(depth):
        error = raised(RuntimeError(f"link {number}"), error)
    report = FailureReport.of(0, error, "evaluation")
    assert (report.rank, report.culprit, report.kind, report.message) == (0, 2, "KeyError", "'a'")
    assert (report.where, report.traceback) == ("forward pass of unit 'blocks.1'", "Traceback ...")
    assert report.is_consequence
    assert not report.may_go_on


def test_a_failure_in_the_same_process_that_another_rank_began() -> None:
    """A cause that is the exception itself, as in a world of threads, is told by its class and message."""
    error = raised(PeerError(2, KeyError("a"), waiting_rank=0, op="all_gather", label="blocks.1"))
    report = FailureReport.of(0, error, "evaluation")
    assert (report.culprit, report.kind, report.message, report.where) == (2, "KeyError", "'a'", "")


def test_an_endless_chain_of_causes() -> None:
    """Exceptions that are each other's causes are the rank's own."""
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert FailureReport.of(0, one, "").culprit == 0


@each_row(
    "report",
    [
        FailureReport.of(0, ValueError("x"), "the loss"),
        FailureReport.death(1, "killed"),
        FailureReport.departure(2, "its last line"),
        FailureReport.divergence(3, ("default",), "ranks diverge"),
        FailureReport.of(0, ValueError("x"), "").passed_on_by(4),
    ],
    ids=lambda report: report.kind,
)
def test_it_travels_as_plain_values(report: FailureReport) -> None:
    """A record arrives as it was sent, with what follows from it."""
    found = FailureReport.from_words(json.loads(json.dumps(report.to_words())))
    assert found == report
    kinds = (found.is_death, found.is_departure, bool(found.diverged), found.is_consequence)
    assert sum(kinds) == (0 if report.rank == 0 else 1)
    assert found.may_go_on == (report.rank == 0)
