"""The table that decides whether full parameters may go, row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from each_row import each_row

from flatparam_comm import Residency
from flatparam_runtime.passes.freeing import Juncture, may_free
from flatparam_runtime.unit import Phase


def _unit(**facts: Any) -> Any:
    """A unit at rest under FULL_SHARD, of which a test changes facts."""
    plan = SimpleNamespace(free_after_forward=True, free_after_unsynced_backward=True, keeps_outermost=False)
    unit = SimpleNamespace(
        plan=plan,
        phase=Phase.IDLE,
        residency=Residency.UNSHARDED,
        is_needed=False,
        is_stale=False,
        was_given_data=False,
        trainable=("a flat parameter",),
        showing=SimpleNamespace(are_held=False),
        reducer=SimpleNamespace(synchronises=True),
    )
    for name, value in facts.items():
        owner = plan if hasattr(plan, name) else unit
        owner = unit.showing if name == "are_held" else unit.reducer if name == "synchronises" else owner
        setattr(owner, name, value)
    return unit


def _call(**facts: Any) -> Any:
    """A call inside a recorded pass whose outputs are watched."""
    known = {
        "in_backward": False,
        "failed": False,
        "recorded": True,
        "watched": True,
        "is_top": False,
        "inputs": {},
        "returned": (),
    }
    return SimpleNamespace(**(known | facts))


RECORDED, INFERENCE = SimpleNamespace(recorded=True), SimpleNamespace(recorded=False)

CALL_ENDED: list[tuple[str, bool, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("a plain call", True, {}, {}, {}),
    ("in a backward pass", False, {}, {"in_backward": True}, {}),
    ("first in backward", False, {}, {}, {"is_next": True}),
    ("first in backward, of a call that is not recorded", True, {}, {"recorded": False}, {"is_next": True}),
    ("another call uses them", False, {"is_needed": True}, {}, {}),
    (
        "another call uses them, and this one failed",
        True,
        {"is_needed": True},
        {"failed": True, "recorded": False},
        {},
    ),
    ("outputs hide their tensors", False, {}, {"watched": False}, {}),
    ("outputs hide, of a frozen unit", True, {"trainable": ()}, {"watched": False}, {}),
    (
        "outputs hide, of a frozen unit with inputs",
        False,
        {"trainable": ()},
        {"watched": False, "inputs": {1: 2}},
        {},
    ),
    ("the plan keeps them", False, {"free_after_forward": False}, {}, {}),
    ("the plan keeps the outermost", False, {"keeps_outermost": True}, {"is_top": True}, {}),
    ("the plan keeps the outermost, and it is another", True, {"keeps_outermost": True}, {}, {}),
    (
        "the plan keeps them for a checkpoint",
        False,
        {"free_after_forward": False},
        {"recorded": False},
        {"around": RECORDED},
    ),
    (
        "the plan keeps them, and nothing is recorded",
        True,
        {"free_after_forward": False},
        {"recorded": False},
        {"around": INFERENCE},
    ),
    (
        "the plan keeps them, and the outermost call is not recorded",
        True,
        {"free_after_forward": False},
        {"recorded": False, "is_top": True},
        {"around": RECORDED},
    ),
]


@each_row(
    ("facts", "of_call", "more", "goes"),
    [(f, c, m, g) for _, g, f, c, m in CALL_ENDED],
    ids=[row[0] for row in CALL_ENDED],
)
def test_after_a_call(facts: dict[str, Any], of_call: dict[str, Any], more: dict[str, Any], goes: bool) -> None:
    """Each row of CALL_ENDED decides as it says."""
    more = {"around": RECORDED} | more
    assert may_free(_unit(**facts), Juncture.CALL_ENDED, _call(**of_call), **more) is goes


def test_what_a_call_returned_stays() -> None:
    """Who called computes with a parameter that the call has returned, whether the unit is the caller's or a lender."""
    unit = _unit()
    call = _call(returned={id(unit)})
    call.returned = [unit]
    assert not may_free(unit, Juncture.CALL_ENDED, call, around=RECORDED)
    assert not may_free(unit, Juncture.READER_ENDED, call, around=RECORDED)


@each_row(
    ("facts", "of_call", "around", "goes"),
    [
        ({}, {}, RECORDED, True),
        ({"is_needed": True}, {}, RECORDED, False),
        ({"phase": Phase.FORWARD}, {}, RECORDED, False),
        ({"free_after_forward": False}, {}, RECORDED, False),
        ({"free_after_forward": False}, {}, INFERENCE, True),
        ({}, {"watched": False}, RECORDED, False),
        ({}, {"watched": False, "recorded": False}, RECORDED, True),
        ({}, {"watched": False}, INFERENCE, True),
    ],
)
def test_after_a_reader(facts: dict[str, Any], of_call: dict[str, Any], around: Any, goes: bool) -> None:
    """Each row of READER_ENDED decides as it says."""
    assert may_free(_unit(**facts), Juncture.READER_ENDED, _call(**of_call), around=around) is goes


@each_row(
    ("moment", "facts", "is_kept", "goes"),
    [
        (Juncture.LOAN_ENDED, {}, False, True),
        (Juncture.LOAN_ENDED, {"is_needed": True}, False, False),
        (Juncture.LOAN_ENDED, {"phase": Phase.FORWARD}, False, False),
        (Juncture.LOAN_ENDED, {"free_after_forward": False}, False, False),
        (Juncture.FORWARD_ENDED, {}, False, False),
        (Juncture.FORWARD_ENDED, {"residency": Residency.UNSHARDING}, False, True),
        (Juncture.FORWARD_ENDED, {"residency": Residency.UNSHARDING, "phase": Phase.FORWARD}, False, False),
        (Juncture.FORWARD_ENDED, {"residency": Residency.UNSHARDING, "are_held": True}, False, False),
        (Juncture.COMPLETE, {}, False, True),
        (Juncture.COMPLETE, {}, True, False),
        (Juncture.COMPLETE, {"synchronises": False}, False, True),
        (Juncture.COMPLETE, {"synchronises": False, "free_after_unsynced_backward": False}, False, False),
        (Juncture.COMPLETE, {"free_after_unsynced_backward": False}, False, True),
        (Juncture.PASS_BEGINS, {}, False, True),
        (Juncture.PASS_BEGINS, {}, True, False),
        (Juncture.PASS_BEGINS, {"are_held": True}, False, False),
        (Juncture.PASS_BEGINS, {"is_stale": True}, True, True),
        (Juncture.PASS_BEGINS, {"was_given_data": True, "are_held": True}, True, True),
    ],
)
def test_other_moments(moment: Juncture, facts: dict[str, Any], is_kept: bool, goes: bool) -> None:
    """Each row of the other moments decides as it says."""
    assert may_free(_unit(**facts), moment, is_kept=is_kept) is goes
