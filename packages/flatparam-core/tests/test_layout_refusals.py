"""Every kind of broken layout is refused when it is built, with a message that names what is wrong."""

import pytest
import torch
from each_row import each_row
from hypothesis import assume, given
from hypothesis import strategies as st

from flatparam_core import FlatLayout, Fragment, LayoutError, ParamSpec, Slot, Span

from .strategies import layouts


def slot(fqn: str, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Slot:
    return Slot(ParamSpec(fqn, (stop - start,), dtype), Span(start, stop))


def test_slot_of_another_length() -> None:
    """A slot that is not as long as its parameter is refused by name."""
    with pytest.raises(LayoutError, match="'w' has 6 elements and a slot of 5"):
        Slot(ParamSpec("w", (2, 3), torch.float32), Span(0, 5))


def test_overlapping_slots() -> None:
    """Two parameters that share an element are refused."""
    with pytest.raises(LayoutError, match="'b' overlaps"):
        FlatLayout((slot("a", 0, 4), slot("b", 3, 6)), 1, 6)


def test_slots_out_of_order() -> None:
    """Slots that do not come in the order of their starts are refused."""
    with pytest.raises(LayoutError, match="'a' overlaps"):
        FlatLayout((slot("b", 4, 6), slot("a", 0, 4)), 1, 6)


def test_slots_behind_the_end() -> None:
    """A parameter that ends behind the flat parameter is refused."""
    with pytest.raises(LayoutError, match="end at 6, behind the 5"):
        FlatLayout((slot("a", 0, 6),), 1, 5)


def test_negative_numel() -> None:
    """A flat parameter of less than no elements is refused, even if its parameters are empty."""
    with pytest.raises(LayoutError, match="behind"):
        FlatLayout((slot("a", 0, 0),), 2, -2)


@each_row("world_size", [0, -1])
def test_world_of_nobody(world_size: int) -> None:
    """A world size below 1 is refused, by the layout and by the plan."""
    with pytest.raises(LayoutError, match=f"found {world_size}"):
        FlatLayout((slot("a", 0, 4),), world_size, 4)
    with pytest.raises(LayoutError, match=f"found {world_size}"):
        FlatLayout.plan([ParamSpec("a", (4,), torch.float32)], world_size=world_size)


def test_no_parameter() -> None:
    """A layout without parameters is refused, by the layout and by the plan."""
    with pytest.raises(LayoutError, match="at least one parameter"):
        FlatLayout((), 1, 0)
    with pytest.raises(LayoutError, match="at least one parameter"):
        FlatLayout.plan([], world_size=1, alignment_nbytes=16)


def test_uneven_split() -> None:
    """A length that the ranks cannot share evenly is refused."""
    with pytest.raises(LayoutError, match="7 elements cannot be split evenly over 2"):
        FlatLayout((slot("a", 0, 6),), 2, 7)


def test_mixed_dtypes() -> None:
    """Two dtypes in one layout are refused, with the parameter and both dtypes."""
    with pytest.raises(LayoutError, match=r"'b' has dtype torch\.bfloat16, the flat parameter torch\.float32"):
        FlatLayout((slot("a", 0, 2), slot("b", 2, 4, torch.bfloat16)), 1, 4)


def test_duplicate_names() -> None:
    """Two parameters of one name are refused."""
    with pytest.raises(LayoutError, match="'a'"):
        FlatLayout((slot("a", 0, 2), slot("a", 2, 4)), 1, 4)


@each_row("aliases", [(("b",), ()), ((), ("a",)), (("c",), ("c",))])
def test_duplicate_aliases(aliases: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    """A further name of one parameter that is a name of another is refused, else loading would choose one of them."""
    specs = [ParamSpec(fqn, (2,), torch.float32, aliases=more) for fqn, more in zip("ab", aliases, strict=True)]
    with pytest.raises(LayoutError):
        FlatLayout.plan(specs, world_size=1)


@each_row("rank", [-1, 3, 64])
def test_rank_outside_the_world(rank: int) -> None:
    """A rank that the layout does not have is refused, not wrapped around."""
    layout = FlatLayout.plan([ParamSpec("a", (4,), torch.float32)], world_size=3)
    with pytest.raises(LayoutError, match=f"rank {rank} is not one of the 3 ranks"):
        layout.shard_span(rank)
    with pytest.raises(LayoutError, match=f"rank {rank}"):
        list(layout.fragments(rank))


def test_fragment_of_two_lengths() -> None:
    """A fragment whose two spans differ in length is refused."""
    with pytest.raises(LayoutError, match="differ in length"):
        Fragment(0, Span(0, 3), Span(0, 2))


@given(layouts(), st.data())
def test_moving_any_slot_onto_its_neighbour(layout: FlatLayout, data: st.DataObject) -> None:
    """Take any valid layout and move one non-empty slot one element into the one before: it is refused."""
    full = [number for number, slot in enumerate(layout.slots) if slot.span]
    assume(len(full) > 1)
    at = data.draw(st.sampled_from(full[1:]))
    before = layout.slots[full[full.index(at) - 1]].span
    moved = Slot(layout.slots[at].spec, Span(before.stop - 1, before.stop - 1 + layout.slots[at].span.numel))
    slots = (*layout.slots[:at], moved, *layout.slots[at + 1 :])
    with pytest.raises(LayoutError, match="overlaps"):
        FlatLayout(slots, layout.world_size, layout.numel)


@given(layouts(), st.integers(1, 63))
def test_cutting_the_end_off_any_layout(layout: FlatLayout, off: int) -> None:
    """Take any valid layout that is longer than its slots need by less than the cut: it is refused."""
    end = layout.slots[-1].span.stop
    with pytest.raises(LayoutError):
        FlatLayout(layout.slots, layout.world_size, end - off if end >= off else -off)
