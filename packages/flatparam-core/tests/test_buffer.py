"""FlatBuffer: memory that comes and goes under tensors that stay."""

import pytest
import torch
from each_row import each_row
from hypothesis import given

from flatparam_core import FlatBuffer, FlatLayout, ParamSpec

from .strategies import layouts, planned_layouts, tensor_for, tensors_for

CPU = torch.device("cpu")


def buffer_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **plan: int) -> FlatBuffer:
    specs = [ParamSpec(f"p{number}", shape, dtype) for number, shape in enumerate(shapes)]
    return FlatBuffer.create(FlatLayout.plan(specs, world_size=2, **plan), dtype=dtype, device=CPU)


def stored(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().size()


@given(layouts())
def test_bytes_are_exactly_the_layouts(layout: FlatLayout) -> None:
    """A buffer holds nothing when made and when freed, and exactly ``numel * itemsize`` bytes while allocated."""
    buffer = FlatBuffer.create(layout, dtype=layout.dtype, device=CPU)
    assert stored(buffer.tensor) == 0
    for _ in range(2):
        buffer.allocate()
        assert stored(buffer.tensor) == buffer.nbytes == layout.numel * layout.dtype.itemsize
        assert buffer.is_allocated
        buffer.free()
        assert stored(buffer.tensor) == 0
        assert buffer.is_allocated == (layout.numel == 0)


@each_row("dtype", [torch.bfloat16, torch.float64])
def test_bytes_are_those_of_its_own_dtype(dtype: torch.dtype) -> None:
    """A buffer whose dtype is not that of its layout takes the bytes of its own dtype."""
    layout = FlatLayout.plan([ParamSpec("a", (6,), torch.float32)], world_size=2)
    buffer = FlatBuffer.create(layout, dtype=dtype, device=CPU)
    buffer.allocate()
    assert stored(buffer.tensor) == 6 * dtype.itemsize
    assert buffer.view(0).dtype is dtype


def test_allocating_twice_keeps_the_bytes() -> None:
    """A second allocate, and a second free, do nothing."""
    buffer = buffer_of((4,))
    buffer.allocate()
    buffer.tensor.fill_(3.0)
    address = buffer.tensor.data_ptr()
    buffer.allocate()
    assert buffer.tensor.data_ptr() == address
    assert buffer.tensor.tolist() == [3.0] * 4
    buffer.free()
    buffer.free()
    assert stored(buffer.tensor) == 0


@given(planned_layouts(torch.float32))
def test_views_survive_free_and_allocate(layout: FlatLayout) -> None:
    """Views that were made once show, after any free and refill, exactly what was filled in, in their strides."""
    buffer = FlatBuffer.create(layout, dtype=layout.dtype, device=CPU)
    buffer.allocate()
    views = buffer.views()
    for start in (1.0, 500.0):
        buffer.free()
        buffer.allocate()
        buffer.tensor.copy_(torch.arange(start, start + layout.numel))
        for slot, view in zip(layout.slots, views, strict=True):
            wanted = tensor_for(slot.spec, int(start) + slot.span.start)
            assert torch.equal(view.detach(), wanted.detach())
            assert view.stride() == wanted.stride()
            assert stored(view) == buffer.nbytes


def test_filling_does_not_bump_the_views_versions() -> None:
    """Freeing, allocating and writing the whole buffer is no in-place change of a view; writing the view is."""
    buffer = buffer_of((2, 3), (4,))
    buffer.allocate()
    views = buffer.views()
    before = [view._version for view in views]
    buffer.tensor.fill_(1.0)
    buffer.shard(0).zero_()
    buffer.free()
    buffer.allocate()
    buffer.tensor.copy_(torch.zeros(10))
    buffer.shard(1).fill_(2.0)
    assert [view._version for view in views] == before
    views[0].fill_(5.0)
    assert [view._version for view in views] == [before[0] + 1, before[1]]


def test_saved_tensors_are_right_after_free_and_refill() -> None:
    """Tensors that autograd saved in a forward pass are used in the backward pass as they were filled in again."""
    buffer = buffer_of((3,), (3,))
    buffer.allocate()
    buffer.tensor.copy_(torch.arange(1.0, 7.0))
    leaves = [view.requires_grad_() for view in buffer.views()]
    product = (leaves[0] * leaves[1]).sum()
    buffer.free()
    buffer.allocate()
    # The allocator may return any bytes.
    buffer.tensor.fill_(torch.nan)
    buffer.tensor.copy_(torch.arange(1.0, 7.0))
    product.backward()
    assert leaves[0].grad is not None
    assert leaves[0].grad.tolist() == [4.0, 5.0, 6.0]
    assert leaves[1].grad is not None
    assert leaves[1].grad.tolist() == [1.0, 2.0, 3.0]


def test_an_in_place_change_of_a_leaf_is_still_seen_by_autograd() -> None:
    """Autograd refuses a backward pass through a leaf that was changed in place after it was used."""
    buffer = buffer_of((3,))
    buffer.allocate()
    buffer.tensor.fill_(2.0)
    leaf = buffer.view(0).requires_grad_()
    square = (leaf * leaf).sum()
    with torch.no_grad():
        leaf.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_views_do_not_share_versions_with_each_other() -> None:
    """Changing one parameter in place does not invalidate what autograd saved of its neighbour."""
    buffer = buffer_of((2,), (2,))
    buffer.allocate()
    buffer.tensor.fill_(2.0)
    one, other = (view.requires_grad_() for view in buffer.views())
    square = (one * one).sum()
    with torch.no_grad():
        other.add_(1.0)
    square.backward()
    assert one.grad is not None
    assert one.grad.tolist() == [4.0, 4.0]


@given(layouts(torch.float64))
def test_shards_are_the_layouts_slices(layout: FlatLayout) -> None:
    """Rank after rank, the shards are views that make up the whole buffer."""
    buffer = FlatBuffer.create(layout, dtype=layout.dtype, device=CPU)
    buffer.allocate()
    for rank in range(layout.world_size):
        buffer.shard(rank).fill_(rank)
    wanted = torch.arange(layout.world_size).repeat_interleave(layout.shard_numel)
    assert torch.equal(buffer.tensor, wanted.to(torch.float64))


@given(layouts(torch.float32))
def test_the_gaps_are_all_that_is_not_a_parameter(layout: FlatLayout) -> None:
    """In a buffer poisoned with NaN, zeros in the gaps leave each parameter its elements, and no NaN."""
    buffer = FlatBuffer.create(layout, dtype=layout.dtype, device=CPU)
    buffer.allocate()
    buffer.tensor.fill_(torch.nan)
    tensors = tensors_for([slot.spec for slot in layout.slots])
    for view, tensor in zip(buffer.views(), tensors, strict=True):
        view.copy_(tensor)
    for gap in buffer.gaps():
        gap.zero_()
    assert all(torch.equal(view, tensor) for view, tensor in zip(buffer.views(), tensors, strict=True))
    assert all(not buffer.tensor[gap.as_slice()].any() for gap in layout.gaps)
    assert not torch.isnan(buffer.tensor).any()


def test_reading_a_freed_view_fails() -> None:
    """A new view of a freed buffer is an error of torch, not somebody else's memory."""
    buffer = buffer_of((4,))
    with pytest.raises(RuntimeError, match="out of bounds"):
        buffer.view(0)


@each_row("how", ["created", "left", "given away"])
def test_memory_that_is_taken_in_inference_mode_can_be_written_outside(how: str) -> None:
    """An evaluation in inference mode may be what takes memory; a training pass writes there afterwards, in place."""
    buffer = buffer_of((3,))
    with torch.inference_mode():
        if how == "created":
            buffer = buffer_of((3,))
        buffer.allocate()
        if how == "left":
            buffer.leave()
        elif how == "given away":
            buffer.give_away()
            buffer.allocate()
    assert not buffer.tensor.is_inference()
    buffer.tensor.fill_(1.0)
