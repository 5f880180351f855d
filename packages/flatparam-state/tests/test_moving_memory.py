"""Memory that moves: what `offload` and `onload` are made of."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flatparam_state.moved_memory import pieces_of, relocated, to_device

SIZES = st.lists(st.integers(0, 5000), max_size=30)


@given(SIZES, st.sampled_from([64, 1024, 4096, 2**32]))
def test_pieces_of_pinned_memory(sizes: list[int], most: int) -> None:
    """Each storage lies in one piece, alone in its bytes; pieces are powers of two, and less than half is empty."""
    pieces = pieces_of(sizes, most)
    placed = [number for piece in pieces for number in piece.starts]
    assert sorted(placed) == [number for number, size in enumerate(sizes) if size]
    for piece in pieces:
        assert piece.nbytes.bit_count() == 1
        longest = -(-max(sizes[number] for number in piece.starts) // 64) * 64
        assert piece.nbytes <= max(most, 2 * longest - 1)
        end = 0
        for number, start in sorted(piece.starts.items(), key=lambda item: item[1]):
            assert start >= end
            assert start % 64 == 0
            end = start + sizes[number]
        assert end <= piece.nbytes < 2 * piece.nbytes_used
    assert sum(piece.nbytes for piece in pieces) < 2 * sum(-(-size // 64) * 64 for size in sizes) or not placed


def test_the_pieces_of_a_model() -> None:
    """Eighty shards of 428 MiB take eight hundredths more than they have, in pieces of 4 GiB."""
    sizes = [428 * 2**20] * 80
    pieces = pieces_of(sizes, 2**32)
    assert {piece.nbytes for piece in pieces[:-1]} == {2**32}
    assert sum(piece.nbytes for piece in pieces) < 1.08 * sum(sizes)


def test_what_shares_memory_shares_it_in_the_new_place() -> None:
    """Views of one storage are views of one new storage, with their shapes and strides; the old ones do not change."""
    whole, other = torch.arange(12.0), torch.ones(3)
    views = [whole[2:8].view(2, 3).t(), other, whole[4:]]
    moved, nbytes = relocated(views, ["one", "two", "two"], to_device(torch.device("cpu")))
    assert nbytes == 12 * 4 + 3 * 4
    assert all(torch.equal(new, old) for new, old in zip(moved, views, strict=True))
    assert [new.stride() for new in moved] == [old.stride() for old in views]
    moved[2].fill_(-1.0)
    assert moved[0].eq(-1.0).any()
    assert moved[1].eq(1.0).all()
    assert torch.equal(whole, torch.arange(12.0))
