"""The world of threads: what goes wrong comes out at once, on every rank, and says what it was."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row

from flatparam_comm import (
    CollectiveError,
    Collectives,
    DeadlockError,
    MismatchError,
    PeerError,
    RankError,
    ReduceOp,
)
from flatparam_comm.testing import run_threads

Program = Callable[[Collectives], Any]


def _raised(size: int, program: Program, **options: Any) -> tuple[RankError, list[BaseException | None]]:
    """The error of the world, and what each rank itself saw."""
    seen: list[BaseException | None] = [None] * size

    def watched(comm: Collectives) -> Any:
        try:
            return program(comm)
        except BaseException as error:
            seen[comm.rank] = error
            raise

    with pytest.raises(RankError) as raised:
        # An error must not wait for a timeout.
        run_threads(size, watched, timeout=None, **options)
    return raised.value, seen


def _post(kind: str, comm: Collectives) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "gather 4": lambda: comm.all_gather(torch.zeros(4 * comm.size), torch.zeros(4), label="A").wait(),
        "gather 5": lambda: comm.all_gather(torch.zeros(5 * comm.size), torch.zeros(5), label="B").wait(),
        "gather half": lambda: comm.all_gather(
            torch.zeros(4 * comm.size).half(), torch.zeros(4).half(), label="C"
        ).wait(),
        "sum": lambda: comm.all_reduce(torch.zeros(4), label="D").wait(),
        "max": lambda: comm.all_reduce(torch.zeros(4), op=ReduceOp.MAX, label="E").wait(),
        "from 0": lambda: comm.broadcast(torch.zeros(4), root=0, label="F").wait(),
        "from 1": lambda: comm.broadcast(torch.zeros(4), root=1, label="G").wait(),
        "exchange": lambda: comm.exchange(1, label="H"),
        "barrier": lambda: comm.barrier(label="I"),
        "subgroup": lambda: comm.subgroup([0]),
        "subgroup 1": lambda: comm.subgroup([1]),
    }
    calls[kind]()


@each_row(
    ("one", "other", "words"),
    [
        (
            "gather 4",
            "gather 5",
            ["all_gather 'A' (4 x float32 on HERE)", "all_gather 'B' (5 x float32 on HERE)"],
        ),
        ("gather 4", "gather half", ["all_gather 'A' (4 x float32", "all_gather 'C' (4 x float16"]),
        ("gather 4", "sum", ["all_gather 'A'", "all_reduce 'D' (sum, 4 x float32 on HERE)"]),
        ("sum", "max", ["all_reduce 'D' (sum, 4", "all_reduce 'E' (max, 4"]),
        ("from 0", "from 1", ["broadcast 'F' (root 0, 4", "broadcast 'G' (root 1, 4"]),
        ("exchange", "barrier", ["exchange 'H'", "barrier 'I'"]),
        ("barrier", "gather 4", ["barrier 'I'", "all_gather 'A'"]),
        ("subgroup", "subgroup 1", ["subgroup (ranks [0])", "subgroup (ranks [1])"]),
    ],
)
def test_calls_that_differ_are_an_error_on_every_rank(one: str, other: str, words: list[str]) -> None:
    """If ranks' n-th calls differ in op, numel, dtype, reduction or root, every rank is told what each called."""
    error, seen = _raised(3, lambda comm: _post(other if comm.rank == 1 else one, comm))
    assert isinstance(error.__cause__, MismatchError)
    for rank, mine in enumerate(seen):
        assert isinstance(mine, MismatchError)
        assert mine.rank == rank
        called = [words[0], words[1], words[0]]
        for caller, word in enumerate(each.replace("HERE", str(torch.get_default_device())) for each in called):
            assert f"rank {caller} called {word}" in str(mine)
        assert "make every rank call the same" in str(mine)


def test_labels_need_not_agree() -> None:
    """Labels are the caller's own: ranks with different labels meet."""
    assert run_threads(2, lambda comm: comm.exchange(comm.rank, label=f"rank {comm.rank}")) == [[0, 1]] * 2


def test_a_difference_is_found_though_a_rank_never_comes() -> None:
    """Two ranks that differ are told so even if a third never makes that call, since none of them can go on."""
    error, seen = _raised(3, lambda comm: _post(["sum", "max", "sum"][comm.rank], comm) if comm.rank < 2 else None)
    assert isinstance(error.__cause__, MismatchError)
    assert isinstance(seen[0], MismatchError)
    assert isinstance(seen[1], MismatchError)
    assert "rank 2 has not called yet" in str(error)


def test_a_circle_of_waits_is_an_error_at_once() -> None:
    """If every rank waits for another, every rank gets an error that names what each of them waits for."""

    def circle(comm: Collectives) -> None:
        pair = comm.subgroup([0, 1])
        if comm.rank == 0:
            assert pair is not None
            pair.barrier(label="pair")
        comm.all_reduce(torch.zeros(1), label="all").wait()

    error, seen = _raised(3, circle)
    assert isinstance(error.__cause__, DeadlockError)
    for rank, mine in enumerate(seen):
        assert isinstance(mine, DeadlockError)
        assert mine.rank == rank
        assert (mine.op, mine.label) == (("barrier", "pair") if rank == 0 else ("all_reduce", "all"))
        assert "rank 0 waits for barrier 'pair' (call 0 of the group of ranks [0, 1]; not called by [1])" in str(mine)
        for other in (1, 2):
            assert f"rank {other} waits for all_reduce 'all'" in str(mine)
        assert "not called by [0]" in str(mine)


def test_waiting_for_a_rank_that_has_finished_is_an_error_at_once() -> None:
    """A rank that returns too early is named by those that still wait for it."""
    error, seen = _raised(3, lambda comm: comm.barrier(label="end") if comm.rank else None)
    assert error.rank == 1
    assert seen[0] is None
    assert isinstance(seen[1], DeadlockError)
    assert isinstance(seen[2], DeadlockError)
    assert "rank 0 has finished" in str(error)


def test_a_collective_that_others_never_joined_is_an_error_at_the_end() -> None:
    """A call that nobody waited for and not every rank made does not pass unnoticed."""
    with pytest.raises(RankError, match=r"rank 0 called all_reduce 'D'.*rank 1 has not called yet"):
        run_threads(2, lambda comm: comm.all_reduce(torch.zeros(1), label="D") if comm.rank == 0 else None)


def _explode(comm: Collectives) -> None:
    if comm.rank == 1:
        raise KeyError("no such layer")
    comm.barrier(label="after layers")


def test_the_original_exception_comes_out_with_its_rank_and_traceback() -> None:
    """run_threads raises RankError from the very exception of the rank that failed, its traceback intact."""
    error, seen = _raised(3, _explode)
    assert error.rank == 1
    assert "rank 1 of 3 failed with KeyError: 'no such layer'" in str(error)
    assert error.__cause__ is seen[1]
    assert "_explode" in [frame.name for frame in traceback.extract_tb(error.__cause__.__traceback__)]


def test_the_others_are_woken_with_a_peer_error() -> None:
    """Ranks that wait when another fails get PeerError: it names the failed rank, its exception and their own call."""
    _, seen = _raised(3, _explode)
    for rank in (0, 2):
        mine = seen[rank]
        assert isinstance(mine, PeerError)
        assert mine.rank == 1
        assert mine.cause is seen[1]
        assert mine.waiting_rank == rank
        assert (mine.op, mine.label) == ("barrier", "after layers")
        assert f"rank {rank}: barrier 'after layers': rank 1 failed first with KeyError" in str(mine)


def test_of_several_culprits_the_lowest_is_named() -> None:
    """If ranks fail by themselves, the lowest is reported; ranks that fail because of it are not culprits."""

    def program(comm: Collectives) -> None:
        if comm.rank in (1, 2):
            raise ValueError(f"own mistake of {comm.rank}")
        try:
            comm.barrier()
        except PeerError:
            raise RuntimeError("a consequence, though of a lower rank")  # noqa: B904 - the context is the point

    error, seen = _raised(3, program)
    assert error.rank == 1
    assert error.__cause__ is seen[1]


def test_a_rank_that_waits_for_a_healthy_group_is_woken_too() -> None:
    """A failure ends the whole world, also the waits in groups that the failed rank is not in."""

    def program(comm: Collectives) -> None:
        pair = comm.subgroup([0, 1])
        if comm.rank == 2:
            raise ValueError("mine")
        if comm.rank == 0:
            assert pair is not None
            pair.exchange(0, label="pair")
        else:
            comm.barrier()

    _, seen = _raised(3, program)
    assert isinstance(seen[0], PeerError)
    assert seen[0].label == "pair"


def test_clean_up_after_a_failure_cannot_hang() -> None:
    """A rank that calls collectives while it unwinds gets the error again; what was complete can be waited for."""

    def program(comm: Collectives) -> None:
        output = torch.zeros(2)
        complete = comm.all_gather(output, torch.tensor([float(comm.rank)]))
        if comm.rank == 1:
            raise ValueError("mine")
        try:
            comm.barrier()
        finally:
            complete.wait()
            assert output.tolist() == [0.0, 1.0]
            with pytest.raises(PeerError):
                comm.all_reduce(output)
            with pytest.raises(PeerError):
                comm.exchange(1)

    error, _ = _raised(2, program)
    assert error.rank == 1


def test_results_that_cannot_be_worked_out_are_an_error() -> None:
    """An input whose memory is gone before the last rank has posted is reported, not read."""

    def program(comm: Collectives) -> None:
        shard = torch.zeros(4)
        pending = comm.all_gather(torch.zeros(8), shard, label="freed")
        shard.untyped_storage().resize_(0)
        pending.wait()

    error, _ = _raised(2, program)
    assert "rank 0: all_gather 'freed': expected the input's storage to hold 16 bytes until wait(), found 0" in str(
        error
    )


@each_row("late", [True, False])
def test_freeing_the_output_before_the_wait_is_an_error(late: bool) -> None:
    """Waiting for an output whose storage was freed says so instead of writing to no memory."""

    def program(comm: Collectives) -> None:
        output = torch.zeros(8)
        pending = comm.all_gather(output, torch.zeros(4), label="unit 3")
        output.untyped_storage().resize_(0)
        pending.wait()

    error, _ = _raised(2, program, deliver_late=late)
    assert isinstance(error.__cause__, CollectiveError)
    assert "all_gather 'unit 3': expected the output's storage to hold 32 bytes until wait(), found 0" in str(error)
    assert "wait before you free it" in str(error)


def test_helper_threads_are_refused() -> None:
    """A collective that is called from a thread that is not the rank's own is an error that says so."""

    def program(comm: Collectives) -> list[str]:
        messages: list[str] = []

        def call() -> None:
            try:
                comm.barrier(label="from a helper")
            except CollectiveError as error:
                messages.append(str(error))

        helper = threading.Thread(target=call, name="helper")
        helper.start()
        helper.join()
        return messages

    for messages in run_threads(2, program):
        assert len(messages) == 1
        assert (
            "barrier 'from a helper': expected a call from the rank's own thread, found thread 'helper'" in messages[0]
        )
