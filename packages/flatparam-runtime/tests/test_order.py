"""The expected next units, as pure functions of the units that ran before."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatparam_comm import SingleCollectives, Topology
from flatparam_runtime import Unit, UnitPlan, shard_module
from flatparam_runtime.passes.record import ForwardPass, next_forward

UNITS = [shard_module(nn.Identity(), UnitPlan(Topology(SingleCollectives()))) for _ in range(6)]
ORDERS = st.lists(st.sampled_from(UNITS), max_size=12)


def naive_next_backward(ended: Sequence[Unit], unit: Unit) -> list[Unit]:
    """The units in the reverse of the order of their last ends; those behind ``unit``."""
    last = sorted({u: i for i, u in enumerate(ended)}.items(), key=lambda item: -item[1])
    order = [u for u, _ in last]
    return order[order.index(unit) + 1 :] if unit in order else []


@given(ORDERS, st.integers(0, 12), st.integers(0, 4))
def test_a_pass_that_repeats_gets_its_continuation(before: list[Unit], length: int, depth: int) -> None:
    """After any beginning of the pass before, the next ``depth`` units are its continuation."""
    now = before[:length]
    expected = before[len(now) : len(now) + depth] if now else []
    assert list(next_forward(before, now, depth)) == expected


@given(ORDERS, ORDERS, st.integers(0, 4))
def test_what_differs_gets_nothing(before: list[Unit], now: list[Unit], depth: int) -> None:
    """If the unit that began last is not the one of the pass before at that place, no unit is expected."""
    found = list(next_forward(before, now, depth))
    assert len(found) <= depth
    place = len(now) - 1
    if not now or place >= len(before) or before[place] is not now[place]:
        assert found == []
    else:
        assert found == before[place + 1 :][:depth]


@given(ORDERS, st.sampled_from(UNITS))
def test_depth_zero_is_never(before: list[Unit], unit: Unit) -> None:
    """Depth zero expects nothing."""
    assert list(next_forward([*before, unit], [*before, unit], 0)) == []


@given(ORDERS, st.sampled_from(UNITS))
def test_backward_goes_the_other_way(ended: list[Unit], unit: Unit) -> None:
    """After a unit come those that ended before it, backwards, each once, where it ended last."""
    assert list(ForwardPass(ended=ended).before(unit)) == naive_next_backward(ended, unit)


@given(ORDERS, ORDERS, st.sampled_from(UNITS))
def test_calls_that_end_later_count(first: list[Unit], more: list[Unit], unit: Unit) -> None:
    """A pass that was asked before answers by all calls that have ended since, too."""
    current = ForwardPass(ended=list(first))
    list(current.before(unit))
    current.ended += more
    assert list(current.before(unit)) == naive_next_backward([*first, *more], unit)


@given(ORDERS, st.sampled_from(UNITS))
def test_backward_never_names_itself_or_one_twice(ended: list[Unit], unit: Unit) -> None:
    """No unit is expected after itself, and none twice."""
    found = list(ForwardPass(ended=ended).before(unit))
    assert unit not in found
    assert len(set(found)) == len(found)


@given(ORDERS, st.sampled_from(UNITS))
def test_the_policies_decide_and_do_not_act(order: list[Unit], unit: Unit) -> None:
    """The functions change neither the orders nor the units."""
    copy = list(order)
    list(ForwardPass(ended=order).before(unit))
    list(next_forward(order, order, 2))
    assert order == copy
    assert not any(each.calls or each.handles for each in UNITS)


def test_orders_belong_to_one_pass() -> None:
    """A new pass begins with empty orders of its own."""
    first, second = ForwardPass(), ForwardPass()
    first.began.append(UNITS[0])
    assert second.began == []
    assert first.ended == []
