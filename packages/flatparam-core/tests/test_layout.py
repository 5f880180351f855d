"""FlatLayout: slots, gaps, shards and fragments of every layout, for world sizes 1 to 64."""

import itertools

import torch
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatparam_core import FlatLayout, ParamSpec, Span, memory_view, plan_layouts
from flatparam_core.testing import shards_of

from .strategies import (
    ALIGNMENTS,
    DTYPES,
    WORLD_SIZES,
    layouts,
    planned_layouts,
    ruled_specs,
    tensors_for,
    unit_specs,
)


def tiles(spans: list[Span], numel: int) -> bool:
    """Whether the non-empty spans, as they come, lie end to end from 0 to ``numel``."""
    ends = [0, *(span.stop for span in spans)]
    return [span.start for span in spans] == ends[:-1] and ends[-1] == numel


@given(layouts())
def test_slots_and_gaps_partition_the_flat_parameter(layout: FlatLayout) -> None:
    """Every element lies in exactly one slot or one gap, and the gaps are not empty and as long as they can be."""
    slots = [slot.span for slot in layout.slots if slot.span]
    assert tiles(sorted([*slots, *layout.gaps]), layout.numel)
    assert all(layout.gaps)
    assert all(before.stop < after.start for before, after in itertools.pairwise(layout.gaps))


@given(layouts())
def test_shards_are_equal_and_partition_the_flat_parameter(layout: FlatLayout) -> None:
    """The ranks' shards lie end to end, cover everything and have one length."""
    shards = [layout.shard_span(rank) for rank in range(layout.world_size)]
    assert {shard.numel for shard in shards} == {layout.shard_numel}
    assert tiles(shards, layout.numel)


@given(layouts())
def test_fragments_cover_every_parameter_once(layout: FlatLayout) -> None:
    """In the order of ranks, the fragments of a parameter lie end to end from its first to its last element."""
    for index, slot in enumerate(layout.slots):
        parts = [layout.fragment(index, rank).in_param for rank in range(layout.world_size)]
        assert tiles([part for part in parts if part], slot.spec.numel)


@given(layouts())
def test_fragments_point_at_the_same_element_in_both_coordinates(layout: FlatLayout) -> None:
    """Counted in the shard or in the parameter, a fragment is the same elements of the flat parameter."""
    for rank in range(layout.world_size):
        for fragment in layout.fragments(rank):
            if fragment.in_param:
                slot, shard = layout.slots[fragment.index].span, layout.shard_span(rank)
                in_flat = fragment.in_param.shifted(slot.start)
                assert in_flat == fragment.in_shard.shifted(shard.start)
                assert slot.contains(in_flat)
                assert shard.contains(in_flat)


@given(layouts())
def test_fragments_of_a_rank_do_not_overlap(layout: FlatLayout) -> None:
    """On each rank the fragments come in slot order, one per slot, and no two share an element of the shard."""
    for rank in range(layout.world_size):
        fragments = list(layout.fragments(rank))
        assert [fragment.index for fragment in fragments] == list(range(len(layout.slots)))
        held = [fragment.in_shard for fragment in fragments if fragment.in_shard]
        assert all(before.stop <= after.start for before, after in itertools.pairwise(held))
        assert all(span.stop <= layout.shard_numel for span in held)


@given(layouts(torch.float32) | layouts(torch.complex128) | layouts(torch.int64))
def test_fragments_of_all_ranks_rebuild_every_parameter(layout: FlatLayout) -> None:
    """The shards of all ranks hold every parameter bit for bit, and zeros in every gap."""
    tensors = tensors_for([slot.spec for slot in layout.slots])
    shards = shards_of(tensors, layout)
    assert all(shard.shape == (layout.shard_numel,) for shard in shards)
    flat = torch.cat(shards)
    for gap in layout.gaps:
        assert not flat[gap.as_slice()].any()
    for index, (slot, tensor) in enumerate(zip(layout.slots, tensors, strict=True)):
        pieces = [shards[rank][layout.fragment(index, rank).in_shard.as_slice()] for rank in range(layout.world_size)]
        rebuilt = torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=slot.spec.dtype)
        memory_view(rebuilt, slot.spec).copy_(torch.cat(pieces))
        assert torch.equal(rebuilt, tensor)
        assert rebuilt.stride() == tensor.stride()


@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(ALIGNMENTS), WORLD_SIZES)
def test_plan_keeps_order_and_alignment(
    data: st.DataObject, dtype: torch.dtype, alignment: int, world_size: int
) -> None:
    """A plan keeps the order of its parameters, and each begins at a multiple of the alignment in bytes."""
    specs = data.draw(unit_specs(dtype))
    layout = FlatLayout.plan(specs, world_size=world_size, alignment_nbytes=alignment)
    assert tuple(slot.spec for slot in layout.slots) == specs
    assert layout.fqns == tuple(spec.fqn for spec in specs)
    assert layout.dtype is dtype
    if alignment:
        assert all(slot.span.start * dtype.itemsize % alignment == 0 for slot in layout.slots)


@given(
    st.data(),
    st.sampled_from(DTYPES),
    st.sampled_from((6, 16)),
    st.lists(st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]), max_size=2),
    WORLD_SIZES,
    st.booleans(),
)
def test_slots_and_shards_are_aligned_in_every_dtype(
    data: st.DataObject,
    dtype: torch.dtype,
    alignment: int,
    held_in: list[torch.dtype],
    world_size: int,
    are_ruled: bool,
) -> None:
    """Each parameter and each shard begins at a multiple of the alignment in its own dtype, and in those it is cast to.

    A rule does not change that; uneven shares do not either.
    """
    specs = data.draw(ruled_specs(dtype) if are_ruled else unit_specs(dtype))
    shares = data.draw(st.lists(st.integers(1, 9), min_size=world_size, max_size=world_size) | st.just([]))
    layout = FlatLayout.plan(
        specs,
        world_size=world_size,
        alignment_nbytes=alignment,
        shard_alignment_nbytes=alignment,
        held_in=held_in,
        shares=shares,
    )
    starts = [slot.span.start for slot in layout.slots if slot.span]
    starts += [layout.shard_span(rank).start for rank in range(world_size)]
    for each in (dtype, *(held_in if dtype.is_floating_point else ())):
        assert all(start * each.itemsize % alignment == 0 for start in starts)


@given(planned_layouts(), st.sampled_from([0, 8, 16]))
def test_a_layout_is_packed_again(layout: FlatLayout, alignment: int) -> None:
    """`repacked` keeps parameters, their order and the ranks, and gives each rank the shortest equal part."""
    packed = layout.repacked(alignment)
    assert [slot.spec for slot in packed.slots] == [slot.spec for slot in layout.slots]
    assert packed.world_size == layout.world_size
    assert packed.numel - packed.slots[-1].span.stop < packed.world_size
    assert (
        packed.slots
        == FlatLayout.plan([slot.spec for slot in layout.slots], world_size=1, alignment_nbytes=alignment).slots
    )
    if not alignment:
        assert packed.slots[-1].span.stop == sum(slot.spec.numel for slot in layout.slots)


@given(planned_layouts(), st.sampled_from(ALIGNMENTS))
def test_plan_wastes_as_little_as_it_can(layout: FlatLayout, alignment: int) -> None:
    """Each gap between parameters is shorter than the alignment, and the one at the end than the world size.

    If shards are aligned it is shorter than their alignments together.
    """
    specs = [slot.spec for slot in layout.slots]
    ranks, step = layout.world_size, max(1, alignment // layout.dtype.itemsize)
    layout = FlatLayout.plan(specs, world_size=ranks, alignment_nbytes=alignment)
    ends = [0, *(slot.span.stop for slot in layout.slots)]
    assert all(slot.span.start - end < step for slot, end in zip(layout.slots, ends, strict=False))
    assert layout.numel - ends[-1] < ranks
    aligned = FlatLayout.plan(specs, world_size=ranks, alignment_nbytes=alignment, shard_alignment_nbytes=alignment)
    assert aligned.slots == layout.slots
    assert aligned.numel - ends[-1] < (ranks * step if ranks > 1 else 1)


@each_row(
    ("dtype", "alignment"),
    [(torch.complex128, 24), (torch.float32, 6), (torch.float64, 4), (torch.bfloat16, 1)],
)
def test_plan_aligns_where_the_item_size_does_not_divide(dtype: torch.dtype, alignment: int) -> None:
    """An alignment that is no multiple of the item size is met too, at the next offset that is a multiple of both."""
    layout = FlatLayout.plan([ParamSpec(name, (1,), dtype) for name in "abc"], world_size=2, alignment_nbytes=alignment)
    assert all(slot.span.start * dtype.itemsize % alignment == 0 for slot in layout.slots)


@given(planned_layouts())
def test_equal_plans_are_equal_layouts(layout: FlatLayout) -> None:
    """A layout is a value: what is built again from its facts is equal and hashes alike, whatever it has cached."""
    assert layout.gaps is layout.gaps
    again = FlatLayout(layout.slots, layout.world_size, layout.numel)
    assert again == layout
    assert hash(again) == hash(layout)


def test_world_larger_than_the_parameter() -> None:
    """With more ranks than elements, the last ranks hold padding only and still a shard of the common length."""
    layout = FlatLayout.plan([ParamSpec("scale", (), torch.float32)], world_size=4)
    assert (layout.numel, layout.shard_numel) == (4, 1)
    assert layout.fragment(0, 0).in_param == Span(0, 1)
    assert not any(layout.fragment(0, rank).in_param for rank in (1, 2, 3))


def test_a_layout_of_nothing_but_empty_parameters() -> None:
    """Parameters without elements make a flat parameter of no elements, on any number of ranks."""
    layout = FlatLayout.plan([ParamSpec("a", (0, 3), torch.float32), ParamSpec("b", (0,), torch.float32)], world_size=3)
    assert (layout.numel, layout.shard_numel, layout.gaps) == (0, 0, ())
    assert [shard.numel() for shard in shards_of(tensors_for([s.spec for s in layout.slots]), layout)] == [
        0,
        0,
        0,
    ]


def test_an_uneven_parameter_by_hand() -> None:
    """Five and four elements over two ranks: the picture in the documentation."""
    layout = FlatLayout.plan([ParamSpec("a", (5,), torch.float32), ParamSpec("b", (2, 2), torch.float32)], world_size=2)
    assert (layout.numel, layout.gaps) == (10, (Span(9, 10),))
    assert [fragment.in_param for fragment in layout.fragments(0)] == [Span(0, 5), Span(0, 0)]
    assert [fragment.in_shard for fragment in layout.fragments(1)] == [Span(0, 0), Span(0, 4)]


@st.composite
def mixed_specs(draw: st.DrawFn) -> list[ParamSpec]:
    """Parameters of several dtypes, trainable and frozen, in any order."""
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=9))
    return [
        ParamSpec(f"p{number}", (draw(st.integers(0, 6)),), dtype, dtype.is_floating_point and draw(st.booleans()))
        for number, dtype in enumerate(dtypes)
    ]


@given(mixed_specs(), WORLD_SIZES, st.sampled_from(ALIGNMENTS))
def test_plan_layouts_groups_by_dtype_and_training(specs: list[ParamSpec], world_size: int, alignment: int) -> None:
    """Each parameter is in one layout, of one dtype and all trainable or all frozen, in as few as that takes."""
    planned = plan_layouts(specs, world_size=world_size, alignment_nbytes=alignment)
    held = [slot.spec for layout in planned for slot in layout.slots]
    assert sorted(held, key=lambda spec: spec.fqn) == sorted(specs, key=lambda spec: spec.fqn)
    kinds = [{(slot.spec.requires_grad, slot.spec.dtype) for slot in layout.slots} for layout in planned]
    assert all(len(kind) == 1 for kind in kinds)
    assert len(planned) == len({(spec.requires_grad, spec.dtype) for spec in specs})
    assert all(layout.world_size == world_size for layout in planned)


@given(mixed_specs())
def test_plan_layouts_puts_trainable_first_and_keeps_order(specs: list[ParamSpec]) -> None:
    """Trainable layouts come before frozen ones, dtypes as they first appear, and parameters as they were given."""
    planned = plan_layouts(specs, world_size=2)
    trainable = [layout.slots[0].spec.requires_grad for layout in planned]
    assert trainable == sorted(trainable, reverse=True)
    place = {spec.fqn: number for number, spec in enumerate(specs)}
    for layout in planned:
        numbers = [place[fqn] for fqn in layout.fqns]
        assert numbers == sorted(numbers)
    for wanted in (True, False):
        firsts = [place[layout.fqns[0]] for layout in planned if layout.slots[0].spec.requires_grad is wanted]
        assert firsts == sorted(firsts)


def test_plan_layouts_of_nothing() -> None:
    """A plan of no parameters has no layouts."""
    assert plan_layouts([], world_size=4) == ()


def test_equal_parameters_share_their_layouts() -> None:
    """The blocks of a model that are built alike have one layout object; a different world size has its own."""
    plans = []
    for _ in range(2):
        block = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, dtype=torch.float64))
        specs = [ParamSpec.of(name, parameter) for name, parameter in block.named_parameters()]
        plans.append(plan_layouts(specs, world_size=2))
    assert all(one is other for one, other in zip(*plans, strict=True))
    assert plan_layouts(specs, world_size=3) != plans[0]
