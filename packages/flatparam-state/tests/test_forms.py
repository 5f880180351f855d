"""The forms of a state that other ranks and files see: a flat parameter as one tensor, and chunks of `DTensor`s."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from flatparam_core import FlatLayout, ParamSpec, plan_layouts
from flatparam_state.forms.chunker import OwnChunker
from flatparam_state.forms.flat_tensor import FlatTensor

SHAPES = [(3, 5), (7,), (2, 2, 3), (1,)]


def tensors_of(own: FlatLayout, alignment: int) -> list[FlatTensor]:
    """The tensor of each rank; FSDP1's without an alignment."""
    saved = own.repacked(alignment)
    return [FlatTensor(own, saved, rank, not alignment) for rank in range(own.world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("alignment", [0, 16], ids=["FSDP1's", "aligned"])
def test_ranks_save_each_element_once(world_size: int, alignment: int) -> None:
    """What the ranks save, one after the other, is the whole tensor, also if there are more ranks than elements."""
    specs = [ParamSpec(f"p{n}", shape, torch.float32) for n, shape in enumerate(SHAPES)]
    (own,) = plan_layouts(specs, world_size=world_size, alignment_nbytes=64)
    tensors = tensors_of(own, alignment)
    for spans in (
        [each.saved_span(rank) for rank, each in enumerate(tensors)],
        [each.held_span(rank) for rank, each in enumerate(tensors)],
    ):
        assert spans[0].start == 0
        assert [span.stop for span in spans] == [*(span.start for span in spans[1:]), tensors[0].numel]


@pytest.fixture
def filled() -> Iterator[None]:
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_lies_between_parameters_is_zero(world_size: int, filled: None) -> None:
    """A rank's part has its elements, and zeros where a file has padding; laid back it is the shard."""
    specs = [ParamSpec(f"p{n}", shape, torch.float32) for n, shape in enumerate(SHAPES)]
    (own,) = plan_layouts(specs, world_size=world_size, alignment_nbytes=64)
    held = []
    for rank, each in enumerate(tensors_of(own, 16)):
        shard = torch.zeros(own.shard_span(rank).numel)
        for fragment in own.fragments(rank):
            shard[fragment.in_shard.as_slice()] = 1 + rank
        held.append(each.held(shard))
        again = torch.zeros_like(shard)
        each.lay(again, held[-1])
        assert torch.equal(again, shard)
    whole, saved = torch.cat(held), own.repacked(16)
    inside = torch.zeros(saved.slots[-1].span.stop, dtype=torch.bool)
    for slot in saved.slots:
        inside[slot.span.as_slice()] = True
    assert whole.isfinite().all()
    assert torch.equal(whole != 0, inside)


@pytest.mark.parametrize(("rank", "rows"), [(0, 1), (1, 1), (2, 0), (3, 0)])
def test_a_rank_without_a_chunk_has_no_rows(rank: int, rows: int) -> None:
    """A `DTensor` of two rows over four ranks is cut as torch cuts it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        found = OwnChunker().chunk_over_mesh(torch.arange(6.0).view(2, 3), mesh, rank)
        assert found.shape == (2, 3)
        assert torch.equal(found.to_local(), torch.arange(6.0).view(2, 3)[rank : rank + rows])
    finally:
        dist.destroy_process_group()
