"""No public complaint of docs/complaints.md is one about flatparam; torch's sides are what the page says."""

from __future__ import annotations

import ast
import inspect
import json

import pytest
import torch
from each_row import each_row

from integration_tests.complaints.page import RESULTS
from integration_tests.complaints.rows import GROUPS, load_all
from integration_tests.complaints.running import Verdict, failed, judged, run_alone, run_rows, worst
from integration_tests.complaints.shared import Leak, Off, Work

ROWS = load_all()
FOUND = json.loads(RESULTS.read_text(encoding="utf-8"))
#: What leaves a process group that no other row can use.
BREAKS = ("DivergenceError", "MismatchError")


def worlds(*sides: str) -> list[tuple[list[str], str]]:
    """The rows that one world of processes can run, and the side."""
    found: dict[tuple[str, int, str], list[str]] = {}
    for report, row in ROWS.items():
        for side in set(row.sides) & {*sides}:
            is_alone = side.startswith("FSDP") or FOUND["rows"][report][side][1] in BREAKS
            found.setdefault((side, row.ranks, report if is_alone else ""), []).append(report)
    return [(reports, where[0]) for where, reports in sorted(found.items())]


def name_of(value: object) -> str:
    """The name of a parameter: the report, if it runs alone, or how many ranks the rows have."""
    if isinstance(value, str):
        return value
    assert isinstance(value, list)
    return value[0] if len(value) == 1 else f"ranks-{ROWS[value[0]].ranks}"


def kinds_on_the_page(reports: list[str], side: str) -> dict[str, str]:
    """What the page says of these rows."""
    return {report: FOUND["rows"][report][side][0] for report in reports}


def short(reports: list[str], side: str) -> bool:
    """Whether a world is in each run of the tests: at the door, only those that several rows share."""
    return side == "flatparam" or len(reports) > 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reports", "side"),
    [where if short(*where) else pytest.param(*where, marks=pytest.mark.long) for where in worlds("flatparam", "door")],
    ids=name_of,
)
def test_flatparam(reports: list[str], side: str) -> None:
    """What flatparam does with each program is what the page says."""
    found = run_rows(reports, side)
    assert {report: verdict.kind for report, verdict in found.items()} == kinds_on_the_page(reports, side), found


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(torch.__version__ != FOUND["made"]["torch"], reason="the page is of another torch")
@pytest.mark.parametrize(("reports", "side"), worlds("FSDP1", "FSDP2"), ids=name_of)
def test_torch(reports: list[str], side: str) -> None:
    """What torch does with each program is what the page says."""
    found = run_alone(reports[0], side)
    assert found.kind == kinds_on_the_page(reports, side)[reports[0]], found


def test_no_complaint_is_about_flatparam() -> None:
    """The page says of each row that flatparam is right, or refuses."""
    assert {verdicts["flatparam"][0] for verdicts in FOUND["rows"].values()} <= {"right", "refused"}


def test_the_door_is_never_worse_than_fsdp2() -> None:
    """With `DTensor`s, what is neither right nor refused ends as with torch's `fully_shard`."""
    doors = {report: found for report, found in FOUND["rows"].items() if "door" in found}
    bad = {report for report, found in doors.items() if found["door"][0] not in ("right", "refused")}
    assert {report: FOUND["rows"][report]["FSDP2"][0] for report in bad} == {
        report: FOUND["rows"][report]["door"][0] for report in bad
    }


def test_programs_are_short() -> None:
    """A program has at most 40 lines, each row is of a group, and each group has rows."""
    for report, row in ROWS.items():
        node = ast.parse(inspect.getsource(row.program)).body[0]
        assert node.end_lineno <= 40, report  # type: ignore[operator]
    assert {row.group for row in ROWS.values()} == {*GROUPS}
    assert len(ROWS) >= 40


@each_row(
    ("found", "expected"),
    [
        (Off(0.00005), Verdict("right")),
        (Off(0.5), Verdict("wrong", "off by 50 %")),
        (Off(float("nan")), Verdict("wrong", "off by nan %")),
        (Leak(999), Verdict("right")),
        (Leak(1000), Verdict("leak", "1,000 bytes a step")),
        (Work(2.0), Verdict("right")),
        (Work(2.5), Verdict("slow", "2.5 times the calls")),
    ],
)
def test_figures_are_judged(found: Off | Leak | Work, expected: Verdict) -> None:
    """What is not a number is wrong, and each limit is where the page says."""
    assert judged(found) == expected


@each_row(
    ("error", "kind"),
    [
        (RuntimeError("Timed out waiting 20000ms"), "hang"),
        (RuntimeError("Connection closed by peer [127.0.0.1]"), "hang"),
        (AssertionError("expected one dtype"), "crash"),
        (ValueError("from the program itself"), "crash"),
    ],
)
def test_errors_are_told_apart(error: Exception, kind: str) -> None:
    """Only an error in the words of a library is a refusal."""
    with pytest.raises(type(error)) as raised:
        raise error
    assert failed(raised.value).kind == kind


def test_the_worst_rank_counts() -> None:
    """One rank that is wrong makes the row wrong, wherever it is."""
    wrong = Verdict("wrong", "off by 50 %")
    assert worst([Verdict("right"), wrong]) == worst([wrong, Verdict("refused")]) == wrong
