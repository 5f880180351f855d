"""Span: the laws of half-open intervals, checked against Python's own sets of integers."""

import pytest
import torch
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st

from flatparam_core import FlatParamError, LayoutError, Span

from .strategies import spans


def members(span: Span) -> set[int]:
    return set(range(span.start, span.stop))


@given(spans())
def test_numel_and_truth(span: Span) -> None:
    """numel counts the integers of a span, and a span is true exactly if it has any."""
    assert span.numel == len(members(span))
    assert bool(span) == bool(members(span))


@given(spans(), spans())
def test_overlap_is_intersection(one: Span, other: Span) -> None:
    """overlap holds exactly the integers that both spans hold, whichever of the two is asked."""
    assert members(one.overlap(other)) == members(one) & members(other)
    assert members(other.overlap(one)) == members(one) & members(other)


@given(spans(), spans(), spans())
def test_overlap_is_associative(a: Span, b: Span, c: Span) -> None:
    """Intersecting three spans gives the same integers in either grouping."""
    assert members(a.overlap(b).overlap(c)) == members(a.overlap(b.overlap(c)))


@given(spans())
def test_overlap_with_itself(span: Span) -> None:
    """A span overlaps itself in itself."""
    assert span.overlap(span) == span


@given(spans(), st.integers(0, 100))
def test_relative_to_undoes_shifted(span: Span, offset: int) -> None:
    """Moving a span right and counting from the offset gives the span back, and keeps its length."""
    assert span.shifted(offset).relative_to(offset) == span
    assert span.shifted(offset).numel == span.numel


@given(spans(), st.integers(1, 100))
def test_relative_to_refuses_an_origin_behind_the_start(span: Span, behind: int) -> None:
    """A span cannot be counted from a point that lies behind its start."""
    with pytest.raises(LayoutError, match="0 <= start"):
        span.relative_to(span.start + behind)


@given(spans(), spans())
def test_contains_is_subset(outer: Span, inner: Span) -> None:
    """contains is the subset relation for spans that hold anything."""
    if inner:
        assert outer.contains(inner) == (members(inner) <= members(outer))
    assert outer.contains(outer)


@given(spans(20))
def test_as_slice_indexes_the_same_integers(span: Span) -> None:
    """Indexing 0, 1, 2, ... with as_slice gives the integers of the span."""
    assert set(torch.arange(20)[span.as_slice()].tolist()) == members(span)


@given(st.lists(spans()))
def test_order_is_by_start_then_stop(drawn: list[Span]) -> None:
    """Sorting spans sorts them by start, and by stop among equal starts."""
    assert sorted(drawn) == sorted(drawn, key=lambda span: (span.start, span.stop))


@each_row(("start", "stop"), [(-1, 0), (3, 2), (-3, -2), (0, -1)])
def test_refuses_what_is_no_interval(start: int, stop: int) -> None:
    """A span that ends before it starts, or starts below zero, is refused with its ends."""
    with pytest.raises(LayoutError, match=rf"\[{start}, {stop}\)"):
        Span(start, stop)


def test_errors_are_flat_param_errors_and_value_errors() -> None:
    """A refused span can be caught as the library's error and as a ValueError."""
    with pytest.raises(FlatParamError):
        Span(2, 1)
    with pytest.raises(ValueError, match="start <= stop"):
        Span(2, 1)


def test_is_frozen_and_hashable() -> None:
    """Equal spans are one dictionary key, and nobody can move the end of one."""
    assert len({Span(1, 2), Span(1, 2), Span(1, 3)}) == 2
    with pytest.raises(AttributeError):
        Span(1, 2).stop = 5  # type: ignore[misc]  # the point of the test
