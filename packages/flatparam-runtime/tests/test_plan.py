"""Plans are frozen facts that validate themselves."""

import attrs
import pytest
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st

from flatparam_comm import Precision, SingleCollectives, Topology
from flatparam_runtime import BackwardOrder, PrefetchPlan, UnitPlan


@given(st.integers(max_value=-1))
def test_a_negative_depth_is_refused(depth: int) -> None:
    """A prefetch depth below zero raises, and the message has what was expected and what was found."""
    with pytest.raises(ValueError, match="at least 0") as caught:
        PrefetchPlan(forward=depth)
    assert str(depth) in str(caught.value)


@given(st.integers(min_value=0, max_value=1000), st.sampled_from(BackwardOrder))
def test_any_other_depth_is_taken(depth: int, order: BackwardOrder) -> None:
    """Every depth from zero on is taken as it is."""
    plan = PrefetchPlan(depth, order)
    assert (plan.forward, plan.backward) == (depth, order)


def test_the_defaults_are_full_shard() -> None:
    """A plan with only a topology frees after forward and backward, prefetches backward, and casts nothing."""
    plan = UnitPlan(Topology(SingleCollectives()))
    assert plan.free_after_forward
    assert plan.free_after_unsynced_backward
    assert plan.prefetch == PrefetchPlan(None, BackwardOrder.BEFORE_COMPUTE)
    assert plan.precision == Precision(None, None)
    assert not plan.use_orig_params


@each_row("name", ["topology", "free_after_forward", "prefetch", "precision"])
def test_a_plan_cannot_be_changed(name: str) -> None:
    """Plans are frozen: a unit's settings stay as they were when it was made."""
    plan = UnitPlan(Topology(SingleCollectives()))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(plan, name, None)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(plan.prefetch, "forward", 3)  # noqa: B010


def test_equal_plans_are_equal() -> None:
    """Plans are compared by their fields."""
    assert UnitPlan(Topology(SingleCollectives())) == UnitPlan(Topology(SingleCollectives()))
    assert UnitPlan(Topology(SingleCollectives())) != UnitPlan(Topology(SingleCollectives()), free_after_forward=False)


@each_row(
    ("changes", "told"),
    [
        ({"topology": None}, "expected a Topology as topology, found None"),
        ({"topology": SingleCollectives()}, "expected a Topology as topology"),
        ({"precision": "bfloat16"}, "expected a Precision as precision, found 'bfloat16'"),
        ({"prefetch": 2}, "expected a PrefetchPlan as prefetch, found 2"),
    ],
)
def test_values_of_a_different_kind_are_refused(changes: dict[str, object], told: str) -> None:
    """A plan says at once which of its parts is something else."""
    with pytest.raises(TypeError, match=told):
        UnitPlan(**{"topology": Topology(SingleCollectives()), **changes})  # type: ignore[arg-type]
