"""The ledger: exact bytes, by formulas that do not look at the implementation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, Totals, Transfer, sent_nbytes
from flatparam_comm.testing import run_threads

OPS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]


@given(size=st.integers(1, 64), shard=st.integers(0, 10**6))
def test_gather_and_scatter_send_all_shards_but_one(size: int, shard: int) -> None:
    """all_gather and reduce_scatter send n-1 shards per rank: (n-1)/n of the full buffer, exactly."""
    for op in ("all_gather", "reduce_scatter"):
        assert sent_nbytes(op, size * shard, rank=0, size=size) == (size - 1) * shard


@given(size=st.integers(1, 64), shard=st.integers(0, 10**6))
def test_all_reduce_is_a_scatter_and_a_gather(size: int, shard: int) -> None:
    """all_reduce sends what reduce_scatter and all_gather of the same buffer send."""
    assert sent_nbytes("all_reduce", size * shard, rank=0, size=size) == 2 * (size - 1) * shard


@given(size=st.integers(1, 64), nbytes=st.integers(0, 10**6), root=st.integers(0, 63))
def test_broadcast_delivers_to_everyone_else(size: int, nbytes: int, root: int) -> None:
    """Over all ranks a broadcast sends the buffer n-1 times; the root sends it once, if there is anyone to get it."""
    root %= size
    sent = [sent_nbytes("broadcast", nbytes, rank=rank, size=size, root=root) for rank in range(size)]
    assert sum(sent) == (size - 1) * nbytes
    assert sent[root] == (nbytes if size > 1 else 0)


@given(size=st.integers(1, 64), nbytes=st.integers(0, 1000))
def test_a_fraction_of_a_byte_is_rounded_up(size: int, nbytes: int) -> None:
    """If n does not divide the bytes, the result is at most one byte more than the exact amount."""
    assert 0 <= sent_nbytes("all_reduce", nbytes, rank=0, size=size) - 2 * nbytes * (size - 1) / size < 1


def test_only_the_data_plane_has_bytes() -> None:
    """Asking for the bytes of anything else is a ValueError that names it."""
    with pytest.raises(ValueError, match="expected a data-plane collective, found 'exchange'"):
        sent_nbytes("exchange", 1, rank=0, size=2)


def _program(comm: Collectives, keep: bool) -> ByteLedger:
    ledger = ByteLedger(keep=keep)
    recording = RecordingCollectives(comm, ledger)
    recording.all_gather(torch.zeros(12), torch.zeros(4), label="unit 0").wait()
    recording.all_gather(torch.zeros(6).half(), torch.zeros(2).half(), label="unit 1").wait()
    recording.reduce_scatter(torch.zeros(4), torch.zeros(12), label="unit 0").wait()
    recording.all_reduce(torch.zeros(3), label="norm").wait()
    recording.broadcast(torch.zeros(5), root=1, label="start").wait()
    recording.exchange("free of charge")
    recording.barrier()
    return ledger


def test_every_transfer_is_entered() -> None:
    """A ledger that keeps has each data-plane call in order, with its label, dtype, payload and the bytes to send."""
    for rank, ledger in enumerate(run_threads(3, _program, True)):
        assert ledger.transfers == (
            Transfer("all_gather", "unit 0", torch.float32, 48, 32),
            Transfer("all_gather", "unit 1", torch.float16, 12, 8),
            Transfer("reduce_scatter", "unit 0", torch.float32, 48, 32),
            Transfer("all_reduce", "norm", torch.float32, 12, 16),
            Transfer("broadcast", "start", torch.float32, 20, 0 if rank == 0 else 20),
        )


def test_totals_are_by_op_and_by_label() -> None:
    """Totals are sums of the transfers by op, by label and of everything; reset() begins anew."""
    ledger = run_threads(3, _program, False)[2]
    assert ledger.by_op() == {
        "all_gather": Totals(2, 60, 40),
        "reduce_scatter": Totals(1, 48, 32),
        "all_reduce": Totals(1, 12, 16),
        "broadcast": Totals(1, 20, 20),
    }
    assert ledger.by_label() == {
        "unit 0": Totals(2, 96, 64),
        "unit 1": Totals(1, 12, 8),
        "norm": Totals(1, 12, 16),
        "start": Totals(1, 20, 20),
    }
    assert ledger.total == Totals(5, 140, 108)
    assert (ledger.payload_nbytes, ledger.sent_nbytes) == (140, 108)
    assert repr(ledger) == "ByteLedger(5 collectives, 108 bytes sent)"
    ledger.reset()
    assert ledger.total == Totals()
    assert ledger.by_op() == ledger.by_label() == {}


def test_a_ledger_keeps_nothing_unless_told_to() -> None:
    """Without keep=True there is no list to grow, and asking for it says how to get one."""
    with pytest.raises(ValueError, match=r"make it with ByteLedger\(keep=True\)"):
        _ = ByteLedger().transfers


def test_a_refused_call_is_not_entered() -> None:
    """A call that the engine refuses moves no bytes."""

    def refused(comm: Collectives) -> int:
        ledger = ByteLedger()
        with pytest.raises(ValueError, match="expected"):
            RecordingCollectives(comm, ledger).all_gather(torch.zeros(5), torch.zeros(4))
        return ledger.total.count

    assert run_threads(2, refused) == [0, 0]


def test_subgroups_enter_in_the_same_ledger() -> None:
    """Bytes of a subgroup count, by the subgroup's own size."""

    def program(comm: Collectives) -> int:
        ledger = ByteLedger()
        pair = RecordingCollectives(comm, ledger).subgroup([0, 2])
        if pair is not None:
            pair.all_gather(torch.zeros(8), torch.zeros(4)).wait()
        return ledger.sent_nbytes

    assert run_threads(3, program) == [16, 0, 16]


def test_a_ledger_does_not_grow_with_the_run() -> None:
    """A thousand steps with the same labels leave as many entries as one step."""
    ledger = ByteLedger()
    for _ in range(1000):
        ledger.record(Transfer("all_gather", "unit", torch.float32, 4, 2))
    assert ledger.by_label() == {"unit": Totals(1000, 4000, 2000)}
    assert len(ledger.by_op()) == 1
