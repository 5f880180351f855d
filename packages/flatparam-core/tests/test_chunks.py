"""Chunked layouts: each rank has the chunk of every parameter that `torch.chunk` gives it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatparam_core import (
    CHUNK,
    ELEMENT,
    FlatLayout,
    LayoutError,
    ParamSpec,
    flatten_module,
)
from flatparam_core.geometry import ShardPieces

SHAPES = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


def specs_of(shapes: Sequence[tuple[int, ...]]) -> list[ParamSpec]:
    return [ParamSpec(f"p{n}", shape, torch.float32, rule=CHUNK) for n, shape in enumerate(shapes)]


def numbered(layout: FlatLayout) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Parameters with different elements, and the flat parameter that they make up."""
    full = torch.zeros(layout.numel)
    values = []
    for slot in layout.slots:
        value = torch.arange(slot.spec.numel).view(slot.spec.shape) + 100.0 * (1 + len(values))
        full[slot.span.as_slice()] = value.flatten()
        values.append(value)
    return values, full


@given(SHAPES, st.integers(1, 9), st.sampled_from([0, 16]))
def test_each_rank_has_torchs_chunk(shapes: list[tuple[int, ...]], world_size: int, alignment: int) -> None:
    """In any shape and at any number of ranks, aligned or not; a rank without a chunk has an empty part."""
    layout = FlatLayout.plan(specs_of(shapes), world_size=world_size, alignment_nbytes=alignment)
    values, full = numbered(layout)
    for rank in range(world_size):
        parts = ShardPieces.of(layout, rank).views(layout.shard_of(full, rank))
        for index, (value, part) in enumerate(zip(values, parts, strict=True)):
            chunks = value.chunk(world_size) if value.numel() else [value]
            expected = chunks[rank] if rank < len(chunks) else value[:0]
            assert torch.equal(part.flatten(), expected.flatten())
            assert not value.numel() or part.shape == expected.shape
            assert (rank in layout.ranks_of(index)) is bool(expected.numel())


@given(SHAPES, st.integers(1, 9), st.sampled_from([0, 16]))
def test_what_ranks_exchange_becomes_parameters_again(
    shapes: list[tuple[int, ...]], world_size: int, alignment: int
) -> None:
    """The shards of all ranks are made of the flat parameter, or of tensors, and the flat parameter of them again."""
    layout = FlatLayout.plan(specs_of(shapes), world_size=world_size, alignment_nbytes=alignment)
    values, full = numbered(layout)
    ends = torch.cat([layout.shard_of(full, rank) for rank in range(world_size)])
    assert ends.numel() == layout.numel
    assert sum(gap.numel for gap in layout.gaps) == layout.numel - sum(s.spec.numel for s in layout.slots)
    if layout.is_chunked and layout.numel:
        assert torch.equal(layout.chunks.joined(full), ends)
        joined = torch.full_like(full, torch.nan)
        layout.chunks.join(dict(enumerate(values)), joined)
        assert torch.equal(joined, ends)
        again = torch.full_like(full, torch.nan)
        layout.chunks.spread(again, ends)
        assert torch.equal(again, full)
    else:
        assert torch.equal(full, ends)


def test_the_padding_is_that_of_uneven_rows() -> None:
    """On two ranks 3 rows of 4 take 4 rows; parameters lie in the order given, as with torch's `fully_shard`."""
    layout = FlatLayout.plan(specs_of([(3, 4), (5,), (4, 2)]), world_size=2)
    assert layout.shard_numels == (8 + 3 + 4,) * 2
    assert [slot.span.start for slot in layout.slots] == [0, 16, 22]
    assert layout.chunks.numels == (8, 3, 4)


@each_row(
    ("change", "shares", "message"),
    [
        ({"rule": ELEMENT}, (), "'p1' has rule element"),
        ({"stride": (1, 2)}, (), "'p1' has rule chunk"),
        ({}, (1.0, 2.0), "different shares"),
    ],
)
def test_chunks_are_of_all_parameters(change: dict[str, object], shares: tuple[float, ...], message: str) -> None:
    """A unit has chunks of all its parameters, row-major, and the ranks have equal shares."""
    specs = specs_of([(2, 3), (2, 3)])
    with pytest.raises(LayoutError, match=message):
        FlatLayout.plan([specs[0], attrs.evolve(specs[1], **change)], world_size=2, shares=shares)  # type: ignore[arg-type]


def test_a_transposed_weight_is_row_major() -> None:
    """Its full parameter has the values in the order of its rows, so that a rank has whole ones."""
    module = nn.Linear(3, 4, bias=False)
    module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())
    expected = module.weight.detach().clone()
    (handle,) = flatten_module(module, rank=1, world_size=2, use_orig_params=True, rule_of=lambda _: CHUNK)
    assert torch.equal(module.weight, expected[2:])
    assert handle.layout.slots[0].spec.is_row_major


@each_row("given", [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.bfloat16, torch.float32) * 2])
def test_gradients_are_joined_as_they_are(given: tuple[torch.dtype, ...]) -> None:
    """Of any dtypes, strides and of scalars, with zeros for those that have not come, cast once."""
    layout = FlatLayout.plan(specs_of([(5, 3), (), (4,), (3, 2)]), world_size=4, alignment_nbytes=16)
    values = [torch.randn(3, 5).t(), torch.tensor(2.0), torch.randn(4)]
    parts = {index: value.to(dtype) for index, (value, dtype) in enumerate(zip(values, given, strict=False))}
    flat = torch.zeros(layout.numel)
    for index, part in parts.items():
        flat[layout.slots[index].span.as_slice()] = part.float().flatten()
    joined = torch.full_like(flat, torch.nan)
    layout.chunks.join(parts, joined)
    assert torch.equal(joined, layout.chunks.joined(flat))


class _Inner(nn.Module):
    """A parameter of its own before two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 3, bias=False)


class _Outer(nn.Module):
    """Parameters of its own before and after such modules, and one without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.none = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(0, 5))
        self.a, self.b = _Inner(), _Inner()


def test_the_order_is_that_of_torchs_fully_shard() -> None:
    """What a module has itself comes behind what its children have, which are in their order; whatever the depth."""
    module = _Outer()
    (handle,) = flatten_module(module, rank=1, world_size=2, use_orig_params=True, rule_of=lambda _: CHUNK)
    inner = ["first.weight", "first.bias", "second.weight", "own"]
    expected = [*(f"a.{name}" for name in inner), *(f"b.{name}" for name in inner), "head", "none"]
    assert [*handle.layout.fqns] == expected
    assert module.none.shape == (0, 5)
    handle.begin_unshard()
    handle.finish_unshard()
    assert module.none.shape == (0, 5)


def test_parameters_without_elements_alone() -> None:
    """A flat parameter of nothing is gathered and freed as any other."""
    module = nn.ParameterList([torch.ones(0, 2), torch.ones(0)])
    (handle,) = flatten_module(module, rank=0, world_size=2, use_orig_params=True, rule_of=lambda _: CHUNK)
    handle.begin_unshard()
    handle.finish_unshard()
    assert [each.shape for each in module] == [(0, 2), (0,)]
    handle.reshard()


def test_one_rank_has_no_chunks() -> None:
    """A world of one has everything in one piece: nothing is copied between chunks and the flat parameter."""
    assert not FlatLayout.plan(specs_of([(4, 2), (3,)]), world_size=1).is_chunked
    assert FlatLayout.plan(specs_of([(4, 2), (3,)]), world_size=2).is_chunked
