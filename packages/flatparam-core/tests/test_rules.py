"""Layout rules: what a rule keeps together is on one rank, for world sizes to 1,024, and in shards of uneven length."""

import itertools
import math
import subprocess
import sys
from collections.abc import Sequence

import attrs
import pytest
import torch
from each_row import each_row
from hypothesis import given, settings
from hypothesis import strategies as st

from flatparam_core import (
    ELEMENT,
    ROW,
    WHOLE,
    FlatLayout,
    LayoutError,
    LayoutRule,
    ParamSpec,
    Slot,
    Span,
    block_of,
    plan_layouts,
    replan,
)
from flatparam_core.geometry.placing import fewest_elements
from flatparam_core.geometry.shard_pieces import ShardPieces
from flatparam_core.testing import shards_of

from .strategies import ruled_layouts, ruled_specs, rules, tensor_for, tensors_for, unit_specs

MANY_RANKS = st.integers(2, 64) | st.sampled_from([100, 128, 255, 256, 512, 1000, 1024])
ANY_RULED = ruled_layouts(world_sizes=MANY_RANKS) | ruled_layouts(world_sizes=st.integers(2, 40), uneven=True)


def spec(name: str, *shape: int, rule: LayoutRule = ELEMENT) -> ParamSpec:
    """A parameter in fp32."""
    return ParamSpec(name, shape, torch.float32, rule=rule)


def rows_of(slot: Slot) -> list[set[int]]:
    """The elements in memory order of each row of a parameter, found by indexing a tensor."""
    numbered = tensor_for(attrs.evolve(slot.spec, dtype=torch.int64, requires_grad=False), 0)
    return [set(row.flatten().tolist()) for row in numbered]


def kept_together(slot: Slot) -> list[set[int]]:
    """The sets of elements of a parameter that its rule keeps on one rank."""
    numel, rule = slot.spec.numel, slot.spec.rule
    if rule.kind == "whole":
        return [set(range(numel))]
    if rule.kind == "row" and slot.spec.shape:
        return rows_of(slot)
    block = rule.block_numel
    return [set(range(start, min(start + block, numel))) for start in range(0, numel, block)]


@given(ANY_RULED)
def test_no_rank_has_a_part_of_what_stays_together(layout: FlatLayout) -> None:
    """Each block, row or tensor that a rule keeps together is in the fragment of one rank, with all its elements."""
    for index, slot in enumerate(layout.slots):
        owned = [layout.fragment(index, rank).in_param for rank in layout.ranks_of(index)]
        holders = {element: rank for rank, span in enumerate(owned) for element in range(span.start, span.stop)}
        for together in kept_together(slot):
            assert len({holders[element] for element in together}) <= 1


@given(ANY_RULED)
def test_every_element_is_on_one_rank(layout: FlatLayout) -> None:
    """The fragments of a parameter lie end to end; slots, gaps and shards each partition the flat parameter."""
    for index, slot in enumerate(layout.slots):
        parts = [layout.fragment(index, rank).in_param for rank in range(layout.world_size)]
        ends = [0, *(part.stop for part in parts if part)]
        assert [part.start for part in parts if part] == ends[:-1]
        assert ends[-1] == slot.spec.numel
        assert [rank for rank, part in enumerate(parts) if part] == list(layout.ranks_of(index))
    assert sum(slot.spec.numel for slot in layout.slots) + sum(g.numel for g in layout.gaps) == layout.numel
    shards = [layout.shard_span(rank) for rank in range(layout.world_size)]
    assert tuple(shard.numel for shard in shards) == layout.shard_numels
    assert all(before.stop == after.start for before, after in itertools.pairwise(shards))
    assert (shards[0].start, shards[-1].stop) == (0, layout.numel)


@given(ANY_RULED)
def test_blocks_are_aligned_in_the_shard(layout: FlatLayout) -> None:
    """Every fragment of a parameter in blocks of k begins at a multiple of k in its parameter and in its shard."""
    for rank in (0, 1, layout.world_size - 1):
        for fragment in layout.fragments(rank):
            rule = layout.slots[fragment.index].spec.rule
            assert fragment.in_param.start % rule.block_numel == 0
            assert fragment.in_shard.start % rule.block_numel == 0


@given(unit_specs(), st.integers(1, 64), st.sampled_from([0, 16]))
def test_layouts_without_rules_are_end_to_end_in_the_order_given(
    specs: Sequence[ParamSpec], world_size: int, alignment: int
) -> None:
    """With `ELEMENT` for all and equal shares, the order is that of the parameters, and padding is alignment only."""
    asked = [attrs.evolve(each, rule=LayoutRule("element")) for each in specs]
    layout = FlatLayout.plan(asked, world_size=world_size, alignment_nbytes=alignment, shares=[0.25] * world_size)
    step = math.lcm(alignment, specs[0].dtype.itemsize) // specs[0].dtype.itemsize if alignment else 1
    assert list(layout.fqns) == [each.fqn for each in specs]
    end = 0
    for slot in layout.slots:
        assert slot.span.start == -(-end // step) * step
        end = slot.span.stop
    assert layout.numel == -(-end // world_size) * world_size
    assert not layout.uneven_numels


@given(ruled_specs(torch.float32), MANY_RANKS)
def test_a_shard_is_no_shorter_than_the_lower_bound(specs: Sequence[ParamSpec], world_size: int) -> None:
    """No plan beats the bound that the tables of padding compare it with, and all elements fit in."""
    layout = FlatLayout.plan(specs, world_size=world_size)
    assert layout.shard_numel >= fewest_elements(specs, world_size)
    assert fewest_elements(specs, world_size) * world_size >= sum(each.numel for each in specs)


@given(ruled_layouts(torch.float64) | ruled_layouts(torch.float64, uneven=True))
def test_shards_rebuild_every_parameter(layout: FlatLayout) -> None:
    """The shards of all ranks, end to end, hold every parameter bit for bit, and zeros in every gap."""
    tensors = tensors_for([slot.spec for slot in layout.slots])
    shards = shards_of(tensors, layout)
    assert tuple(shard.numel() for shard in shards) == layout.shard_numels
    flat = torch.cat(shards)
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        assert torch.equal(flat.as_strided(slot.spec.shape, slot.spec.stride, slot.span.start), tensor)
    assert all(not flat[gap.as_slice()].any() for gap in layout.gaps)


@given(ruled_layouts(torch.float32) | ruled_layouts(torch.float32, uneven=True))
def test_rows_and_whole_tensors_keep_their_shape(layout: FlatLayout) -> None:
    """A rank sees the rows that it has, in shape and in value, of a parameter whose rule keeps rows or all together."""
    tensors = tensors_for([slot.spec for slot in layout.slots])
    shards = shards_of(tensors, layout)
    for rank, shard in enumerate(shards):
        pieces = ShardPieces.of(layout, rank).views(shard)
        for piece, fragment, slot, tensor in zip(pieces, layout.fragments(rank), layout.slots, tensors, strict=True):
            assert piece.dim() == max(1, tensor.dim())
            if slot.spec.rule.kind in ("row", "whole") and slot.spec.shape and slot.spec.is_row_major:
                width = max(1, tensor[0].numel()) if slot.spec.numel else 1
                first = fragment.in_param.start // width
                if piece.numel():
                    assert torch.equal(piece, tensor[first : first + piece.shape[0]])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[FlatLayout, FlatLayout]:
    """Two layouts of the same parameters that share nothing else: rules, order, world sizes, shares."""
    specs = draw(unit_specs(torch.float64))

    def one() -> FlatLayout:
        ruled = [attrs.evolve(each, rule=draw(rules())) for each in draw(st.permutations(specs))]
        world_size = draw(st.integers(1, 20))
        shares = st.lists(st.integers(1, 5), min_size=world_size, max_size=world_size)
        return FlatLayout.plan(
            ruled, world_size=world_size, alignment_nbytes=draw(st.sampled_from([0, 16])), shares=draw(shares)
        )

    return one(), one()


@given(pairs())
def test_replan_goes_between_any_two_layouts(both: tuple[FlatLayout, FlatLayout]) -> None:
    """The moves turn the shards of one layout into those of the other, and write each element once."""
    source, target = both
    values = dict(zip(source.fqns, tensors_for([slot.spec for slot in source.slots]), strict=True))
    held = shards_of([values[name] for name in source.fqns], source)
    made = [torch.zeros(numel, dtype=torch.float64) for numel in target.shard_numels]
    for move in replan([source], [target]):
        there = made[move.target.rank][move.target.span.as_slice()]
        assert not there.any()
        there.copy_(held[move.source.rank][move.source.span.as_slice()])
    wanted = shards_of([values[name] for name in target.fqns], target)
    assert all(torch.equal(found, expected) for found, expected in zip(made, wanted, strict=True))


_PRINTS_A_PLAN = """
import torch
from flatparam_core import ROW, WHOLE, FlatLayout, ParamSpec, block_of
rules = [ROW, WHOLE, block_of(32)]
specs = [ParamSpec(f"p{i}", (7 + i, 11 * (i + 1)), torch.float32, rule=rules[i % 3]) for i in range(20)]
for shares in ((), [1 + rank % 3 for rank in range(12)]):
    layout = FlatLayout.plan(specs, world_size=12, alignment_nbytes=16, shares=shares)
    print([(slot.spec.fqn, slot.span.start) for slot in layout.slots], layout.shard_numels)
"""


@pytest.mark.long
def test_every_process_plans_the_same() -> None:
    """Processes with different hash seeds, as ranks are, print one and the same plan."""
    found = {
        subprocess.run(
            [sys.executable, "-c", _PRINTS_A_PLAN],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=30))
def test_elements_are_shared_by_weight(shares: list[int]) -> None:
    """Without rules, each rank's part of a large parameter is its weight's part, to a thousandth."""
    layout = FlatLayout.plan([spec("w", 1000, 1000)], world_size=len(shares), shares=shares)
    for share, numel in zip(shares, layout.shard_numels, strict=True):
        assert numel == pytest.approx(1e6 * share / sum(shares), rel=1e-3)


def test_whole_tensors_are_packed_tightly() -> None:
    """Six tensors of three sizes fill two ranks without padding, though the order given would leave gaps."""
    sizes = [3, 5, 4, 4, 5, 3]
    specs = [spec(f"p{number}", size, rule=WHOLE) for number, size in enumerate(sizes)]
    layout = FlatLayout.plan(specs, world_size=2)
    assert layout.shard_numel == 12
    assert not layout.gaps


def test_small_parameters_fill_the_gaps() -> None:
    """A free parameter goes where a tensor that stays whole leaves room, in front of what is listed before it."""
    layout = FlatLayout.plan([spec("a", 6, rule=WHOLE), spec("b", 8, rule=WHOLE), spec("bias", 2)], world_size=2)
    assert layout.shard_numel == 8
    assert not layout.gaps


def test_the_order_is_kept_if_another_saves_nothing() -> None:
    """Parameters that fit as they come are not moved."""
    specs = [spec("small", 4, 4, rule=ROW), spec("large", 16, 4, rule=ROW), spec("bias", 16)]
    assert FlatLayout.plan(specs, world_size=4).fqns == ("small", "large", "bias")


def test_a_row_is_an_index_of_the_first_dimension() -> None:
    """Rows are found by shape and memory order; a transposed weight has none in one piece, and stays whole."""
    assert spec("w", 6, 5, rule=ROW).grain == 5
    assert spec("bias", 6, rule=ROW).grain == 1
    assert spec("scale", rule=ROW).grain == 1
    assert spec("nothing", 0, 5, rule=ROW).grain == 1
    channels_last = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    for tensor, grain in ((channels_last, 12), (torch.empty(5, 6).t(), 30)):
        assert attrs.evolve(ParamSpec.of("w", tensor), rule=ROW).grain == grain


def test_a_layout_that_cuts_what_stays_together_is_refused() -> None:
    """A hand-made layout whose boundary cuts a row names the parameter, the rule and the place."""
    slot = Slot(spec("w", 4, 3, rule=ROW), Span(0, 12))
    FlatLayout((slot,), 2, 12)
    with pytest.raises(LayoutError, match=r"'w': its rule is row, which keeps 3 .* at element 4"):
        FlatLayout((slot,), 3, 12)
    with pytest.raises(LayoutError, match=r"its rule is whole, .* at element 6"):
        FlatLayout((Slot(spec("w", 4, 3, rule=WHOLE), Span(0, 12)),), 2, 12)
    with pytest.raises(LayoutError, match=r"its rule is block of 4, .* at element 3"):
        FlatLayout((Slot(spec("w", 12, rule=block_of(4)), Span(3, 15)),), 3, 18)


@each_row(
    ("lengths", "message"),
    [
        ((4, 4, 4), "expected the lengths of 2 shards"),
        ((4, 9), "that add up to 12; found 2 that add up to 13"),
        ((12, 0), "each at least 1"),
        ((6, 6), "uneven_numels must be empty"),
    ],
)
def test_uneven_lengths_that_do_not_fit_are_refused(lengths: tuple[int, ...], message: str) -> None:
    """The lengths of shards have to be those of the ranks, and to add up."""
    with pytest.raises(LayoutError, match=message):
        FlatLayout((Slot(spec("w", 12), Span(0, 12)),), 2, 12, lengths)


def test_one_length_of_uneven_shards_is_refused() -> None:
    """Code that takes all shards for equally long gets an error that says what they are."""
    layout = FlatLayout((Slot(spec("w", 12), Span(0, 12)),), 2, 12, (4, 8))
    assert layout.shard_numels == (4, 8)
    with pytest.raises(LayoutError, match="'w', ... have different lengths, from 4 to 8"):
        _ = layout.shard_numel


def test_a_layout_is_plain_without_rules_and_shares() -> None:
    """Only then a flat tensor tells by itself where the parameters lie in it."""
    assert FlatLayout.plan([spec("a", 4), spec("b", 5)], world_size=3).is_plain
    assert not FlatLayout.plan([spec("a", 4), spec("b", 5, rule=ROW)], world_size=3).is_plain
    assert not FlatLayout.plan([spec("a", 4), spec("b", 5)], world_size=2, shares=(1, 2)).is_plain


@each_row(
    ("shares", "message"),
    [
        ([1.0], "a share for each of the 2 ranks, found 1"),
        ([1.0, 0.0], "the share of rank 1: expected a positive number, found 0.0"),
        ([math.inf, 1.0], "the share of rank 0"),
        ([1.0, math.nan], "the share of rank 1"),
    ],
)
def test_shares_that_are_no_weights_are_refused(shares: list[float], message: str) -> None:
    """Shares are positive, finite, and one for each rank."""
    with pytest.raises(LayoutError, match=message):
        FlatLayout.plan([spec("w", 4)], world_size=2, shares=shares)


@each_row(
    "make",
    [lambda: block_of(0), lambda: block_of(1.5), lambda: block_of("2"), lambda: LayoutRule("row", 4)],  # type: ignore[arg-type]
)
def test_rules_that_mean_nothing_are_refused(make: object) -> None:
    """Blocks have a whole number of elements, at least one, and only blocks have a length."""
    with pytest.raises(LayoutError, match="blocks of"):
        make()  # type: ignore[operator]
    with pytest.raises(LayoutError, match="one of 'element', 'block', 'row', 'chunk' and 'whole', found 'column'"):
        LayoutRule("column")  # type: ignore[arg-type]


def test_equal_parameters_share_one_ruled_plan() -> None:
    """The repeated blocks of a model are planned once, and a different rule is a different plan."""
    one, again, other = (
        plan_layouts([spec("w", 8, 8, rule=rule)], world_size=4) for rule in (ROW, LayoutRule("row"), WHOLE)
    )
    assert one is again
    assert other[0].shard_numel == 64
