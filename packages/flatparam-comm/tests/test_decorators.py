"""Decorators: each changes one thing, and lets the rest through."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor

from flatparam_comm import (
    COMPLETED,
    ByteLedger,
    Collectives,
    CompressedCollectives,
    ContinuedPending,
    Delay,
    Fault,
    FaultyCollectives,
    HookedCollectives,
    Kill,
    Pending,
    RecordingCollectives,
    ReduceOp,
    SilentCollectives,
    SingleCollectives,
)
from flatparam_comm.testing import PATIENCE, longer_and_longer, run_threads


def _decorated(inner: Collectives) -> list[Any]:
    return [
        RecordingCollectives(inner, ByteLedger()),
        SilentCollectives(inner),
        HookedCollectives(inner),
        CompressedCollectives(inner, torch.bfloat16),
        FaultyCollectives(inner, []),
    ]


def test_what_is_not_changed_goes_through() -> None:
    """Every decorator has the inner rank, size and control plane, shows `inner`, and decorates its subgroups alike."""

    def program(comm: Collectives) -> None:
        for decorated in _decorated(comm):
            assert isinstance(decorated, Collectives)
            assert decorated.inner is comm
            assert (decorated.rank, decorated.size) == (comm.rank, comm.size)
            assert decorated.exchange(comm.rank) == [0, 1, 2]
            decorated.barrier()
            assert type(decorated).__name__ in repr(decorated)
            pair = decorated.subgroup([0, 2])
            assert (pair is None) == (comm.rank == 1)
            if pair is not None:
                assert type(pair) is type(decorated)
                assert pair.size == 2
                assert pair.exchange(comm.rank) == [0, 2]

    run_threads(3, program)


def test_silence_moves_only_what_is_here() -> None:
    """SilentCollectives puts the own shard in place, takes the own slice, and leaves all else as it was."""

    def program(comm: Collectives) -> list[list[float]]:
        ledger = ByteLedger()
        silent = SilentCollectives(RecordingCollectives(comm, ledger))
        output, shard = torch.full((4,), -1.0), torch.full((2,), comm.rank + 1.0)
        silent.all_gather(output, shard).wait()
        piece = torch.zeros(2)
        silent.reduce_scatter(piece, torch.tensor([1.0, 2.0, 3.0, 4.0])).wait()
        reduced, sent = torch.full((1,), 7.0 + comm.rank), torch.full((1,), 9.0 + comm.rank)
        silent.all_reduce(reduced).wait()
        silent.broadcast(sent).wait()
        with pytest.raises(ValueError, match=r"rank \d of 2: all_gather: expected output"):
            silent.all_gather(output, output[:1])
        assert ledger.total.count == 0
        return [tensor.tolist() for tensor in (output, piece, reduced, sent)]

    assert run_threads(2, program) == [
        [[1.0, 1.0, -1.0, -1.0], [1.0, 2.0], [7.0], [9.0]],
        [[-1.0, -1.0, 2.0, 2.0], [3.0, 4.0], [8.0], [10.0]],
    ]


def test_hooks_stand_in_for_the_operations() -> None:
    """A hook is called with inner, output, input and label instead of the operation; its pending is waited for."""
    calls: list[tuple[int, str, str]] = []

    def program(comm: Collectives) -> list[list[float]]:
        def gather(inner: Collectives, output: Tensor, shard: Tensor, label: str) -> Pending:
            calls.append((inner.rank, "gather", label))

            def add() -> None:
                output.add_(100.0)

            return ContinuedPending(inner.all_gather(output, shard, label=label), add)

        def mean(inner: Collectives, output: Tensor, full: Tensor, label: str) -> Pending:
            calls.append((inner.rank, "scatter", label))
            return inner.reduce_scatter(output, full / inner.size, label=label)

        def nothing(inner: Collectives, output: Tensor, tensor: Tensor, label: str) -> None:
            assert output is tensor
            calls.append((inner.rank, "reduce", label))

        hooked = HookedCollectives(comm, all_gather=gather, reduce_scatter=mean, all_reduce=nothing)
        output, piece, reduced = torch.zeros(2), torch.zeros(1), torch.full((1,), comm.rank + 1.0)
        hooked.all_gather(output, torch.tensor([float(comm.rank)]), label="a").wait()
        hooked.reduce_scatter(piece, torch.tensor([2.0, 4.0]), label="b").wait()
        hooked.all_reduce(reduced, label="c").wait()
        return [output.tolist(), piece.tolist(), reduced.tolist()]

    assert run_threads(2, program) == [[[100.0, 101.0], [2.0], [1.0]], [[100.0, 101.0], [4.0], [2.0]]]
    for rank in range(2):
        assert [call[1:] for call in calls if call[0] == rank] == [
            ("gather", "a"),
            ("scatter", "b"),
            ("reduce", "c"),
        ]


def test_hooks_for_sums_do_not_get_other_reductions() -> None:
    """A hook for sums is not asked for a maximum, which goes to the engine; arguments are checked before it."""

    def program(comm: Collectives) -> float:
        def never(inner: Collectives, output: Tensor, given: Tensor, label: str) -> None:
            raise AssertionError("called")

        hooked = HookedCollectives(comm, all_gather=never, reduce_scatter=never, all_reduce=never)
        tensor, piece = torch.tensor([float(comm.rank)]), torch.zeros(1)
        hooked.all_reduce(tensor, op=ReduceOp.MAX).wait()
        hooked.reduce_scatter(piece, torch.zeros(2), op=ReduceOp.MIN).wait()
        with pytest.raises(ValueError, match=r"all_gather 'L': expected output\.numel"):
            hooked.all_gather(torch.zeros(3), torch.zeros(1), label="L")
        with pytest.raises(ValueError, match=r"reduce_scatter: expected full\.numel"):
            hooked.reduce_scatter(torch.zeros(1), torch.zeros(3))
        with pytest.raises(ValueError, match="all_reduce: expected tensor to be contiguous"):
            hooked.all_reduce(torch.zeros(2, 2).t())
        return float(tensor)

    assert run_threads(2, program) == [1.0, 1.0]


def test_compression_moves_the_smaller_dtype() -> None:
    """CompressedCollectives moves half the bytes of float32 in bfloat16, and rounds every value as bfloat16 does."""

    def program(comm: Collectives) -> None:
        ledger = ByteLedger(keep=True)
        compressed = CompressedCollectives(RecordingCollectives(comm, ledger), torch.bfloat16)
        values = torch.tensor([1.001, -3.14159]) * (comm.rank + 1)
        rounded = [(torch.tensor([1.001, -3.14159]) * (rank + 1)).bfloat16() for rank in range(2)]
        output = torch.zeros(4)
        pending = compressed.all_gather(output, values, label="gather")
        assert output.tolist() == [0.0] * 4
        pending.wait()
        assert torch.equal(output, torch.cat(rounded).float())
        total = (rounded[0] + rounded[1]).float()
        piece, reduced = torch.zeros(1), values.clone()
        compressed.reduce_scatter(piece, values, label="scatter").wait()
        compressed.all_reduce(reduced, label="reduce").wait()
        assert torch.equal(piece, total[comm.rank : comm.rank + 1])
        assert torch.equal(reduced, total)
        assert [(each.label, each.dtype, each.payload_nbytes) for each in ledger.transfers] == [
            ("gather", torch.bfloat16, 8),
            ("scatter", torch.bfloat16, 4),
            ("reduce", torch.bfloat16, 4),
        ]

    run_threads(2, program)


def test_compression_leaves_alone_what_would_not_shrink() -> None:
    """Half precision, integers, maxima and broadcasts travel as they are, bit for bit."""

    def program(comm: Collectives) -> list[torch.dtype]:
        ledger = ByteLedger(keep=True)
        compressed = CompressedCollectives(RecordingCollectives(comm, ledger), torch.bfloat16)
        compressed.all_gather(torch.zeros(2).half(), torch.zeros(1).half()).wait()
        compressed.all_gather(torch.zeros(2).long(), torch.zeros(1).long()).wait()
        compressed.reduce_scatter(torch.zeros(1).int(), torch.zeros(2).int()).wait()
        exact = torch.tensor([1.001])
        compressed.all_reduce(exact, op=ReduceOp.MAX).wait()
        compressed.reduce_scatter(torch.zeros(1), torch.zeros(2), op=ReduceOp.MIN).wait()
        compressed.broadcast(exact).wait()
        assert exact.tolist() == torch.tensor([1.001]).tolist()
        return [each.dtype for each in ledger.transfers]

    expected = [torch.float16, torch.int64, torch.int32, torch.float32, torch.float32, torch.float32]
    assert run_threads(2, program) == [expected] * 2


@each_row("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_compression_needs_a_dtype_that_can_be_added(dtype: torch.dtype) -> None:
    """Compressing to a dtype that not every engine can add is a ValueError that names it."""
    with pytest.raises(ValueError, match=f"found {dtype}"):
        CompressedCollectives(SingleCollectives(), dtype)


def test_compression_checks_the_callers_arguments() -> None:
    """A bad call is refused in the caller's terms, before anything is cast."""
    compressed = CompressedCollectives(SingleCollectives(), torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected output\.numel\(\) == 1 ranks \* shard\.numel\(\) == 2, found 3"):
        compressed.all_gather(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="expected tensor to be contiguous"):
        compressed.all_reduce(torch.zeros(2, 2).t())


def test_decorators_stack() -> None:
    """Around compression the ledger has the caller's bytes, inside it those that travel."""
    outside, inside = ByteLedger(), ByteLedger()
    comm = RecordingCollectives(
        CompressedCollectives(RecordingCollectives(SingleCollectives(), inside), torch.bfloat16), outside
    )
    comm.all_gather(torch.zeros(8), torch.zeros(8)).wait()
    assert (outside.payload_nbytes, inside.payload_nbytes) == (32, 16)


def test_a_delay_is_spent_before_the_call() -> None:
    """FaultyCollectives sleeps as long as the fault says, at the calls that match, by the sleep it is given."""
    slept: list[float] = []
    faults = [
        Fault("barrier", action=Delay(1.5)),
        Fault("exchange", "x*", nth=1, action=Delay(2.5)),
        Fault(rank=5, action=Delay(9.0)),
    ]
    comm = FaultyCollectives(SingleCollectives(), faults, sleep=slept.append)
    comm.exchange(1, label="x1")
    comm.exchange(1, label="y")
    assert slept == []
    comm.exchange(1, label="x2")
    comm.exchange(1, label="x3")
    comm.barrier()
    comm.barrier()
    assert slept == [2.5, 1.5]


def test_faults_are_checked_when_they_are_made() -> None:
    """A negative delay, a negative number or an unknown action is refused when the fault is made."""
    with pytest.raises(ValueError, match=">= 0"):
        Delay(-1.0)
    with pytest.raises(ValueError, match=">= 0"):
        Fault(nth=-1, action=Delay(0.0))
    with pytest.raises(TypeError):
        Fault(action="explode")  # type: ignore[arg-type]


def test_what_is_over_is_over() -> None:
    """COMPLETED is done; ContinuedPending runs what is left to do once, after the inner wait, and not before."""
    assert COMPLETED.done()
    COMPLETED.wait()
    order: list[str] = []

    class Inner:
        def wait(self) -> None:
            order.append("inner")

        def done(self) -> bool:
            return False

    pending = ContinuedPending(Inner(), lambda: order.append("then"))
    assert not pending.done()
    assert order == []
    pending.wait()
    pending.wait()
    assert order == ["inner", "then", "inner"]


def test_hooks_only_where_they_are_given() -> None:
    """With a hook for sums alone, an all-gather goes to the collectives beneath, and its subgroups have the hook too."""

    def program(comm: Collectives) -> None:
        seen: list[str] = []

        def note(inner: Collectives, output: Tensor, source: Tensor, label: str) -> None:
            seen.append(label)
            output.fill_(7.0)

        hooked = HookedCollectives(comm, all_reduce=note)
        full = torch.zeros(2)
        hooked.all_gather(full, torch.tensor([float(comm.rank)]), label="a").wait()
        assert full.tolist() == [0.0, 1.0]
        everyone = hooked.subgroup([0, 1])
        assert everyone is not None
        everyone.all_reduce(full, label="b").wait()
        assert full.tolist() == [7.0, 7.0]
        assert seen == ["b"]

    run_threads(2, program)


def test_silence_in_place() -> None:
    """A shard that lies inside the full tensor is there already."""
    silent = SilentCollectives(SingleCollectives())
    full = torch.arange(3.0)
    silent.all_gather(full, full).wait()
    silent.reduce_scatter(full, full).wait()
    assert full.tolist() == [0.0, 1.0, 2.0]


def test_a_kill_is_a_signal_to_the_ranks_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Kill` sends its signal at the call that it is meant for, and at no other."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    faulty = FaultyCollectives(SingleCollectives(), [Fault("all_reduce", nth=1, action=Kill(signal.SIGTERM))])
    for expected in (0, 1, 1):
        faulty.all_reduce(torch.ones(1)).wait()
        assert len(sent) == expected
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_limits_grow_until_they_are_the_tests_own() -> None:
    """An attempt is tried with limits that double, as long as they are short beside the patience of all tests."""
    limits = list(longer_and_longer(PATIENCE / 64))
    assert limits == [PATIENCE / 64, PATIENCE / 32, PATIENCE / 16, PATIENCE / 8]
