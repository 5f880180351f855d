"""An interval of a parameter's elements, as boxes of its dimensions."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from flatparam_comm import FlatLayout, ParamSpec, Span
from flatparam_state.forms.tiling import Tiling, boxes_of, cut


@st.composite
def intervals(draw: st.DrawFn) -> tuple[torch.Tensor, Span]:
    """A tensor of up to four dimensions in any order of memory, and an interval of its elements."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    numel = math.prod(shape)
    tensor = torch.arange(float(numel)).view(shape).permute(order)
    start, stop = sorted(draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    return tensor, Span(start, stop)


@given(intervals())
def test_the_boxes_hold_the_interval(case: tuple[torch.Tensor, Span]) -> None:
    """They hold each element of the interval once, in order, and are at most 2 * ndim - 1."""
    tensor, span = case
    spec = ParamSpec.of("weight", tensor)
    elements = tensor.as_strided((tensor.numel(),), (1,))[span.as_slice()]
    boxes = boxes_of(spec, span)
    assert len(boxes) <= max(1, 2 * tensor.dim() - 1)
    assert sum(box.numel for box in boxes) == span.numel
    for box, view in zip(boxes, cut(spec, boxes, elements), strict=True):
        assert torch.equal(box.of(tensor), view)
        assert view.numel() == 0 or view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4), st.integers(1, 5))
def test_the_ranks_of_a_layout_tile_every_parameter(shapes: list[list[int]], world_size: int) -> None:
    """What the ranks own of a parameter covers it once, and `ranks_of` names just those that own something."""
    specs = [ParamSpec(f"p{number}", tuple(shape), torch.float32) for number, shape in enumerate(shapes)]
    layout = FlatLayout.plan(specs, world_size=world_size)
    for index, spec in enumerate(specs):
        owners = [rank for rank in range(world_size) if layout.fragment(index, rank).in_param]
        assert list(layout.ranks_of(index)) == owners
        tiling = Tiling.of_spans(
            spec, lambda rank, index=index: layout.fragment(index, rank).in_param, layout.ranks_of(index)
        )
        counted = torch.zeros(spec.shape)
        for boxes in tiling.boxes.values():
            for box in boxes:
                box.of(counted).add_(1)
        assert torch.equal(counted, torch.ones(spec.shape))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 5))
def test_chunks_are_those_of_torch(shape: list[int], size: int) -> None:
    """Rank r holds `tensor.chunk(size, dim=0)[r]`; where there are fewer chunks, the last ranks hold nothing."""
    tensor = torch.arange(float(math.prod(shape))).view(shape)
    tiling = Tiling.of_chunks(shape, size)
    chunks = tensor.chunk(size, dim=0)
    assert sorted(tiling.boxes) == list(range(len(chunks)))
    for rank, chunk in enumerate(chunks):
        (box,) = tiling.of_rank(rank)
        assert torch.equal(box.of(tensor), chunk)


def test_an_order_of_boxes_makes_no_difference() -> None:
    """Two tilings agree where every rank holds the same boxes, empty ones left aside."""
    spec = ParamSpec("weight", (4, 3), torch.float32)
    whole = Tiling.of_spans(spec, lambda rank: Span(5 * rank, 5 + 7 * rank), range(2))
    turned = Tiling(spec.shape, {rank: boxes[::-1] for rank, boxes in whole.boxes.items()})
    assert whole.agrees_with(turned)
    assert not whole.agrees_with(Tiling.of_chunks(spec.shape, 2))
