"""replan: from any layouts to any other layouts of the same parameters, exactly, on real tensors."""

import itertools
from collections.abc import Sequence

import attrs
import pytest
import torch
from each_row import each_row
from hypothesis import given, settings
from hypothesis import strategies as st

from flatparam_core import FlatLayout, LayoutError, Move, ParamSpec, Span, plan_layouts, replan
from flatparam_core.testing import shards_of

from .strategies import ALIGNMENTS, WORLD_SIZES, tensors_for, unit_specs

# Indexed by layout, then by rank.
Shards = list[list[torch.Tensor]]


def shards(layouts: Sequence[FlatLayout], tensors: dict[str, torch.Tensor]) -> Shards:
    """The shards of ``layouts`` with the values of ``tensors``, which know a tied parameter by each of its names."""
    return [list(shards_of([tensors[fqn] for fqn in layout.fqns], layout)) for layout in layouts]


def blank(layouts: Sequence[FlatLayout]) -> Shards:
    """Shards of ``layouts`` in which every element is NaN."""
    return [
        [torch.full((layout.shard_numel,), torch.nan, dtype=torch.float64) for _ in range(layout.world_size)]
        for layout in layouts
    ]


def execute(moves: Sequence[Move], sources: Shards, targets: Shards) -> None:
    """Do the copies; an element that is written twice fails."""
    for move in moves:
        there = targets[move.target.layout][move.target.rank][move.target.span.as_slice()]
        assert torch.isnan(there).all()
        there.copy_(sources[move.source.layout][move.source.rank][move.source.span.as_slice()])


def check_exact(sources: Sequence[FlatLayout], targets: Sequence[FlatLayout], tensors: dict[str, torch.Tensor]) -> None:
    """Replan, copy, and compare every element of every parameter; the padding must stay untouched."""
    found = blank(targets)
    execute(list(replan(sources, targets)), shards(sources, tensors), found)
    for layout, ranks, wanted in zip(targets, found, shards(targets, tensors), strict=True):
        flat, flat_wanted = torch.cat(ranks), torch.cat(wanted)
        for gap in layout.gaps:
            assert torch.isnan(flat[gap.as_slice()]).all()
            flat[gap.as_slice()] = 0.0
        assert torch.equal(flat, flat_wanted)


@st.composite
def worlds(draw: st.DrawFn, specs: Sequence[ParamSpec]) -> list[FlatLayout]:
    """The parameters in any order, cut anywhere into flat parameters, each with a world size and alignment of its own.

    A parameter that has an alias may go by it.
    """
    ordered = list(draw(st.permutations(specs)))
    for number, spec in enumerate(ordered):
        if spec.aliases and draw(st.booleans()):
            ordered[number] = attrs.evolve(spec, fqn=spec.aliases[0], aliases=(spec.fqn,))
    cuts = sorted(draw(st.sets(st.integers(1, len(ordered) - 1)))) if len(ordered) > 1 else []
    groups = [ordered[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(ordered)])]
    return [
        FlatLayout.plan(group, world_size=draw(WORLD_SIZES), alignment_nbytes=draw(st.sampled_from(ALIGNMENTS)))
        for group in groups
    ]


@st.composite
def tied_specs(draw: st.DrawFn) -> list[ParamSpec]:
    """A unit's parameters, some of them with a second name."""
    return [
        attrs.evolve(spec, aliases=(f"tied.{spec.fqn}",)) if draw(st.booleans()) else spec
        for spec in draw(unit_specs(torch.float64))
    ]


def named_tensors(specs: Sequence[ParamSpec]) -> dict[str, torch.Tensor]:
    tensors = tensors_for(specs)
    return {name: tensor for spec, tensor in zip(specs, tensors, strict=True) for name in (spec.fqn, *spec.aliases)}


@given(st.data())
@settings(max_examples=100)
def test_any_layouts_to_any_layouts(data: st.DataObject) -> None:
    """World size, order, grouping, alignment and tied names may all differ: every target shard is bit-equal."""
    specs = data.draw(tied_specs())
    check_exact(data.draw(worlds(specs)), data.draw(worlds(specs)), named_tensors(specs))


@each_row("source_world", [1, 2, 3, 8, 17, 63, 64])
def test_every_world_size_to_every_other(source_world: int) -> None:
    """A parameter that no world divides evenly moves exactly from worlds of 1 to 64 to others."""
    specs = [ParamSpec("a", (7, 11), torch.float64), ParamSpec("b", (), torch.float64)]
    tensors = named_tensors(specs)
    source = FlatLayout.plan(specs, world_size=source_world)
    for target_world in range(1, 65, 3):
        check_exact([source], [FlatLayout.plan(specs[::-1], world_size=target_world)], tensors)


@given(st.data())
def test_there_and_back(data: st.DataObject) -> None:
    """Moving to other layouts and back gives the shards that it began with."""
    specs = data.draw(tied_specs())
    here, there = data.draw(worlds(specs)), data.draw(worlds(specs))
    before = shards(here, named_tensors(specs))
    between, after = blank(there), blank(here)
    execute(list(replan(here, there)), before, between)
    execute(list(replan(there, here)), between, after)
    for layout, ranks, wanted in zip(here, after, before, strict=True):
        for slot in layout.slots:
            held = slot.span.as_slice()
            assert torch.equal(torch.cat(ranks)[held], torch.cat(wanted)[held])


@given(st.data())
def test_same_layouts_move_nothing_between_ranks(data: st.DataObject) -> None:
    """Replanning a layout to itself leaves each element where it is: a restart moves no bytes between ranks."""
    layouts = data.draw(worlds(data.draw(unit_specs(torch.float32))))
    assert all(move.source == move.target for move in replan(layouts, layouts))


@given(st.data())
def test_moves_name_the_parameter_and_count_alike(data: st.DataObject) -> None:
    """A move is of one length in the parameter, the source and the target, and its elements are in bounds."""
    specs = data.draw(unit_specs(torch.float32))
    sources, targets = data.draw(worlds(specs)), data.draw(worlds(specs))
    numels = {spec.fqn: spec.numel for spec in specs}
    for move in replan(sources, targets):
        assert move.in_param.numel == move.source.span.numel == move.target.span.numel > 0
        assert move.in_param.stop <= numels[move.fqn]
        assert move.source.span.stop <= sources[move.source.layout].shard_numel
        assert move.target.span.stop <= targets[move.target.layout].shard_numel


def test_a_part_of_the_parameters() -> None:
    """The targets may want fewer parameters than there are: nothing else is moved."""
    a, b = ParamSpec("a", (5,), torch.float32), ParamSpec("b", (3,), torch.float32)
    moves = list(replan([FlatLayout.plan([a, b], world_size=2)], [FlatLayout.plan([b], world_size=1)]))
    assert {move.fqn for move in moves} == {"b"}
    assert sum(move.in_param.numel for move in moves) == 3


def test_across_dtypes_and_training() -> None:
    """A parameter that was trained in fp32 loads into a frozen one in bf16: only elements are counted."""
    trained = ParamSpec("w", (6,), torch.float32)
    frozen = ParamSpec("w", (6,), torch.bfloat16, requires_grad=False)
    sources = plan_layouts([trained, ParamSpec("b", (2,), torch.float32)], world_size=2)
    targets = plan_layouts([frozen], world_size=3)
    assert [move.in_param for move in replan(sources, targets)] == [Span(0, 2), Span(2, 4), Span(4, 6)]


def test_refuses_a_missing_parameter() -> None:
    """A target parameter that no source has is refused by name."""
    sources = plan_layouts([ParamSpec("a", (4,), torch.float32)], world_size=2)
    with pytest.raises(LayoutError, match=r"'block\.b' is not in the source"):
        list(replan(sources, plan_layouts([ParamSpec("block.b", (4,), torch.float32)], world_size=2)))


@each_row(
    "found",
    [
        ParamSpec("a", (3, 2), torch.float32),
        ParamSpec("a", (6,), torch.float32),
        ParamSpec("a", (2, 3, 1), torch.float32),
        ParamSpec("a", (2, 4), torch.float32),
        ParamSpec("a", (2, 3), torch.float32, True, (1, 2)),
    ],
)
def test_refuses_another_shape_or_memory_order(found: ParamSpec) -> None:
    """Elements with a different meaning are never copied: a different shape or memory order is refused with both."""
    wanted = plan_layouts([ParamSpec("a", (2, 3), torch.float32)], world_size=2)
    with pytest.raises(LayoutError, match=r"'a': expected shape \(2, 3\) with strides \(3, 1\), found"):
        list(replan(plan_layouts([found], world_size=2), wanted))


@each_row("shape", [(8, 4, 1, 1), (8, 1, 3, 3)])
def test_channels_last_of_one_by_one_is_the_same_order(shape: tuple[int, ...]) -> None:
    """A 1x1 or one-channel convolution lies in memory alike in both formats, so each loads from the other."""
    plain = ParamSpec.of("w", torch.zeros(shape).requires_grad_())
    last = ParamSpec.of("w", torch.zeros(shape).requires_grad_().to(memory_format=torch.channels_last))
    check_exact(
        [FlatLayout.plan([plain], world_size=2)],
        [FlatLayout.plan([last], world_size=3)],
        {"w": torch.arange(1.0, 1 + plain.numel).reshape(shape)},
    )


def test_refuses_before_the_first_move() -> None:
    """A plan is refused before its first move, so that nothing has been copied by then."""
    a, b = ParamSpec("a", (4,), torch.float32), ParamSpec("b", (4,), torch.float32)
    with pytest.raises(LayoutError):
        next(iter(replan(plan_layouts([a], world_size=1), plan_layouts([a, b], world_size=1))))
