"""BufferPool: what it keeps of freed memory, exactly how much, and that it never costs more than the worst moment."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatparam_core import BufferPool, FlatBuffer, FlatLayout, ParamSpec
from flatparam_core.storage import buffer as pool

can_keep = pytest.mark.skipif(not pool._CAN_SWAP, reason="this torch cannot hand memory from storage to storage")

OPERATIONS = st.one_of(
    st.tuples(st.just("allocate"), st.sampled_from((4, 8, 40, 64, 4096))),
    st.tuples(st.just("free"), st.integers(0, 20)),
    st.tuples(st.sampled_from(("trim", "clear")), st.just(0)),
)


def storage() -> torch.UntypedStorage:
    return torch.UntypedStorage(0)


def allocated(source: BufferPool, nbytes: int) -> torch.UntypedStorage:
    made = storage()
    source.allocate(made, nbytes)
    return made


def counts(source: BufferPool) -> tuple[int, int, int, int]:
    return source.in_use, source.kept, source.peak, source.hits


def buffers(source: BufferPool, numel: int, count: int) -> list[FlatBuffer]:
    layout = FlatLayout.plan([ParamSpec("w", (numel,), torch.float32)], world_size=1)
    return [
        FlatBuffer.create(layout, dtype=torch.float32, device=torch.device("cpu"), pool=source) for _ in range(count)
    ]


def really_kept(source: BufferPool) -> int:
    return sum(block.nbytes() for blocks in source._blocks.values() for block in blocks)


@can_keep
def test_freed_memory_goes_to_the_next_of_its_size() -> None:
    """A buffer of the same size gets the very bytes that were freed; that is a hit, and takes no new memory."""
    source = BufferPool()
    first = allocated(source, 4096)
    address = first.data_ptr()
    assert counts(source) == (4096, 0, 4096, 0)
    source.free(first)
    assert (first.nbytes(), *counts(source)) == (0, 0, 4096, 4096, 0)
    second = allocated(source, 4096)
    assert (second.nbytes(), second.data_ptr()) == (4096, address)
    assert counts(source) == (4096, 0, 4096, 1)


@can_keep
def test_another_size_is_a_miss() -> None:
    """Memory of a different size is no use: if both would be more than the peak, the kept memory is dropped."""
    source = BufferPool()
    source.free(allocated(source, 4096))
    larger = allocated(source, 8192)
    assert (larger.nbytes(), *counts(source)) == (8192, 8192, 0, 8192, 0)
    source.free(larger)
    allocated(source, 4096)
    assert counts(source) == (4096, 0, 8192, 0)


@can_keep
def test_what_fits_beside_is_kept_on() -> None:
    """A miss throws nothing away as long as all of it is within the peak."""
    source = BufferPool()
    first, second = allocated(source, 100), allocated(source, 50)
    source.free(first)
    source.free(second)
    allocated(source, 40)
    assert counts(source) == (40, 50, 150, 0)
    allocated(source, 50)
    assert counts(source) == (90, 0, 150, 1)


@given(st.lists(OPERATIONS, max_size=60))
def test_never_more_than_the_worst_moment(program: list[tuple[str, int]]) -> None:
    """In any order of calls the counts are those of the storages, and `in_use + kept <= peak`."""
    source = BufferPool()
    out: list[torch.UntypedStorage] = []
    peak = 0
    for operation, number in program:
        if operation == "allocate":
            out.append(allocated(source, number))
            assert out[-1].nbytes() == number
        elif operation == "free" and out:
            freed = out.pop(number % len(out))
            source.free(freed)
            assert freed.nbytes() == 0
        elif operation in ("trim", "clear"):
            getattr(source, operation)()
            assert (source.kept, really_kept(source)) == (0, 0)
            peak = 0
        peak = max(peak, sum(each.nbytes() for each in out))
        assert source.in_use == sum(each.nbytes() for each in out)
        assert source.kept == really_kept(source)
        assert source.peak == peak
        assert source.in_use + source.kept <= source.peak
        addresses = [each.data_ptr() for each in out]
        assert len(set(addresses)) == len(addresses)


@can_keep
def test_a_trim_begins_a_new_peak_within_the_pass() -> None:
    """After `trim` no more is kept than is in use; the peak of the pass is the larger one of both parts."""
    source = BufferPool()
    first, second = allocated(source, 100), allocated(source, 100)
    source.free(first)
    source.trim()
    assert counts(source) == (100, 0, 100, 0)
    source.free(second)
    assert counts(source) == (0, 100, 100, 0)
    source.clear()
    assert (*counts(source), source.peak_of_pass) == (0, 0, 0, 0, 200)
    source.clear()
    assert source.peak_of_pass == 0


def test_views_outlive_the_memory() -> None:
    """After a free and an allocation a buffer's views see what is written to it then, wherever its memory lies."""
    source = BufferPool()
    first, second = buffers(source, 1000, 2)
    first.allocate()
    view = first.view(0)
    first.free()
    # It takes the memory of the first.
    second.allocate()
    second.tensor.fill_(7.0)
    first.allocate()
    first.tensor.fill_(3.0)
    assert view.data_ptr() == first.tensor.data_ptr() != second.tensor.data_ptr()
    assert torch.equal(view, torch.full((1000,), 3.0))
    assert torch.equal(second.tensor, torch.full((1000,), 7.0))


@can_keep
def test_a_freed_buffer_and_its_views_have_no_bytes() -> None:
    """A read of a freed buffer's view does not reach the memory that is kept: the view's storage is empty."""
    source = BufferPool()
    (buffer,) = buffers(source, 1000, 1)
    buffer.allocate()
    view = buffer.view(0)
    buffer.free()
    assert (view.untyped_storage().nbytes(), really_kept(source)) == (0, 4000)
    assert not buffer.is_allocated


def test_a_buffer_gives_back_to_where_it_took_from() -> None:
    """A buffer that was allocated before it was given a pool is not counted there, until its next allocation."""
    source = BufferPool()
    (buffer,) = buffers(source, 10, 1)
    buffer.pool = None
    buffer.allocate()
    buffer.pool = source
    buffer.free()
    assert counts(source) == (0, 0, 0, 0)
    buffer.allocate()
    buffer.allocate()
    assert counts(source) == (40, 0, 40, 0)
    buffer.free()
    buffer.free()
    assert source.in_use == 0


@can_keep
def test_what_keeps_is_for() -> None:
    """Memory that is freed while `keeps` is off goes back to the system; memory kept before is still handed out."""
    source = BufferPool(keeps=False)
    first = allocated(source, 4096)
    source.free(first)
    assert (first.nbytes(), *counts(source)) == (0, 0, 0, 4096, 0)
    source.keeps = True
    source.free(allocated(source, 4096))
    assert counts(source) == (0, 4096, 4096, 0)
    source.keeps = False
    second = allocated(source, 4096)
    assert counts(source) == (4096, 0, 4096, 1)
    source.free(second)
    assert (second.nbytes(), *counts(source)) == (0, 0, 0, 4096, 1)


def test_without_swapping_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch cannot hand memory on, each buffer is freed to the system, and the counts are still right."""
    monkeypatch.setattr(pool, "_CAN_SWAP", False)
    source = BufferPool()
    first, second = buffers(source, 1000, 2)
    for _ in range(2):
        first.allocate()
        second.allocate()
        second.tensor.fill_(1.0)
        assert counts(source) == (8000, 0, 8000, 0)
        first.free()
        assert (first.tensor.untyped_storage().nbytes(), *counts(source)) == (0, 4000, 0, 8000, 0)
        second.free()
    source.clear()
    assert (*counts(source), source.peak_of_pass) == (0, 0, 0, 0, 8000)


@can_keep
@pytest.mark.parametrize("most", [1, 2])
def test_as_many_blocks_of_a_size_are_kept_as_are_allocated_in_a_row(most: int) -> None:
    """Of three freed blocks one is kept, or two where two are allocated in pairs; the system gets the others."""
    source = BufferPool()
    storages = [torch.empty(0).untyped_storage() for _ in range(3)]
    for storage in storages:
        source.allocate(storage, 400)
    for storage in storages:
        source.free(storage, most)
    assert (source.in_use, source.kept, source.peak) == (0, 400 * most, 1200)
