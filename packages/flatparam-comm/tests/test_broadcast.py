"""Broadcasting many tensors: everything arrives, in buckets no larger than asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatparam_comm import (
    ByteLedger,
    Collectives,
    MismatchError,
    RankError,
    RecordingCollectives,
    broadcast_tensors,
)
from flatparam_comm.testing import run_threads


def _zoo(rank: int, device: str = "cpu") -> list[Tensor]:
    """Tensors of every awkward kind, with values that tell the ranks apart."""
    base = torch.arange(24, device=device) % 5 + rank
    return [
        base.float(),
        base.bool() if rank else ~base.bool(),
        torch.complex(base.float(), -base.float()),
        base.float().view(4, 6).t(),
        base.double()[::3],
        (base[0] + 0.5).float(),
        torch.zeros(0, device=device),
        base.to(torch.float8_e4m3fn),
        base.view(2, 3, 2, 2).float().to(memory_format=torch.channels_last),
        torch.complex(base.float(), base.float()).conj(),
        torch.nn.Parameter(base.bfloat16()),
        base.to(torch.int16),
        base.float()[1:8],
    ]


def _values(tensors: Sequence[Tensor]) -> list[Any]:
    return [tensor.detach().to(torch.complex128).resolve_conj().cpu().tolist() for tensor in tensors]


def _broadcast_zoo(comm: Collectives, device: str) -> None:
    for root in range(comm.size):
        for bucket_nbytes in (1, 100, 10**9):
            mine = _zoo(comm.rank, device)
            pointers = [tensor.data_ptr() for tensor in mine]
            strides = [tensor.stride() for tensor in mine]
            broadcast_tensors(comm, mine, root=root, bucket_nbytes=bucket_nbytes)
            assert _values(mine) == _values(_zoo(root, device)), (root, bucket_nbytes)
            assert [tensor.data_ptr() for tensor in mine] == pointers
            assert [tensor.stride() for tensor in mine] == strides


def test_every_kind_of_tensor_arrives(world: Any) -> None:
    """Any dtype, shape and strides arrive in place from any root, with any size of bucket, on any engine."""
    world.run(_broadcast_zoo)


def _sizes(tensors: list[Tensor], bucket_nbytes: int) -> list[int]:
    """The bytes of each broadcast."""

    def program(comm: Collectives) -> list[int]:
        ledger = ByteLedger(keep=True)
        broadcast_tensors(RecordingCollectives(comm, ledger), tensors, bucket_nbytes=bucket_nbytes)
        return [each.payload_nbytes for each in ledger.transfers]

    return run_threads(2, program)[0]


def test_buckets_are_filled_in_order() -> None:
    """Tensors share a bucket until the next would not fit (each begins at a multiple of 16); large ones go alone."""
    tensors = [torch.zeros(numel, dtype=torch.uint8) for numel in (10, 10, 30, 40, 100, 5, 5)]
    assert _sizes(tensors, 64) == [16 + 16 + 30, 40, 100, 16 + 5]
    assert _sizes(tensors, 1) == [10, 10, 30, 40, 100, 5, 5]
    assert _sizes(tensors, 10**6) == [16 + 16 + 32 + 48 + 112 + 16 + 5]


@settings(max_examples=30, deadline=None)
@given(numels=st.lists(st.integers(0, 200), max_size=12), bucket_nbytes=st.integers(1, 300))
def test_no_bucket_is_larger_than_asked_for(numels: list[int], bucket_nbytes: int) -> None:
    """Whatever the tensors, a message is within the limit or is one tensor, and all bytes travel once."""
    sizes = _sizes([torch.zeros(numel, dtype=torch.uint8) for numel in numels], bucket_nbytes)
    for size in sizes:
        assert size <= bucket_nbytes or size in numels
    assert sum(numels) <= sum(sizes) <= sum(numels) + 15 * len(numels)


def test_strides_may_differ_between_ranks() -> None:
    """A tensor that is contiguous on one rank and transposed on another arrives, though it goes alone."""

    def program(comm: Collectives) -> list[list[float]]:
        values = torch.arange(6.0).view(2, 3) + 10 * comm.rank
        tensor = values if comm.rank == 0 else values.t().contiguous().t()
        broadcast_tensors(comm, [tensor], bucket_nbytes=1)
        return tensor.tolist()

    expected = torch.arange(6.0).view(2, 3).tolist()
    assert run_threads(2, program) == [expected] * 2


def test_different_tensors_are_an_error_before_anything_is_sent() -> None:
    """If shapes, dtypes or the number differ, every rank gets an error that names the first difference."""
    seen: list[str] = []

    def program(comm: Collectives) -> None:
        tensors = [torch.full((3,), float(comm.rank)), torch.zeros(2 + comm.rank)]
        try:
            broadcast_tensors(comm, tensors, label="initial values")
        except MismatchError as error:
            seen.append(str(error))
            assert tensors[0].tolist() == [float(comm.rank)] * 3
            raise

    with pytest.raises(RankError):
        run_threads(2, program)
    assert len(seen) == 2
    here = torch.get_default_device().type
    for message in seen:
        assert "broadcast_tensors 'initial values'" in message
        assert (
            f"found at tensor number 1: rank 0 has ('float32', (2,), {here!r}); rank 1 has ('float32', (3,), {here!r})"
            in message
        )
    with pytest.raises(
        RankError, match=rf"tensor number 0: rank 0 has none; rank 1 has \('float32', \(1,\), {here!r}\)"
    ):
        run_threads(2, lambda comm: broadcast_tensors(comm, [torch.zeros(1)] * comm.rank))


def test_a_bucket_holds_something() -> None:
    """A bucket of no bytes is a ValueError."""
    with pytest.raises(RankError, match="expected bucket_nbytes >= 1, found 0"):
        run_threads(1, lambda comm: broadcast_tensors(comm, [], bucket_nbytes=0))
