"""The world of threads: the order of events, and when bytes arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from hypothesis import given, settings
from hypothesis import strategies as st

from flatparam_comm import Collectives, ReduceOp, SingleCollectives, current_collectives
from flatparam_comm.testing import Delay, Fault, run_processes, run_threads

Log = list[str]


def _gossip(comm: Collectives, log: Log) -> None:
    """A program with some of everything, that writes down what it does."""
    log.append(f"{comm.rank} starts")
    output = torch.zeros(comm.size)
    first = comm.all_gather(output, torch.tensor([float(comm.rank)]), label="first")
    log.append(f"{comm.rank} posted")
    first.wait()
    log.append(f"{comm.rank} has it")
    comm.barrier()
    log.append(f"{comm.rank} ends")


def test_ranks_run_one_at_a_time_in_cyclic_order() -> None:
    """A rank runs until it must wait; then the next that can go on does: the schedule is this list."""
    log: Log = []
    run_threads(3, _gossip, log)
    assert log == [
        # 0 waits for 1 and 2.
        *("0 starts", "0 posted"),
        # 1 waits for 2.
        *("1 starts", "1 posted"),
        # 2 waits in the barrier.
        *("2 starts", "2 posted", "2 has it"),
        "0 has it",
        # 1 was the last to arrive at the barrier.
        *("1 has it", "1 ends"),
        "2 ends",
        "0 ends",
    ]


def _busy(comm: Collectives, log: Log) -> float:
    for step in range(4):
        log.append(f"{comm.rank} step {step}")
        shard = torch.rand(3)
        output = torch.zeros(3 * comm.size)
        pending = comm.all_gather(output, shard, label=f"step {step}")
        if comm.rank % 2:
            log.append(f"{comm.rank} is odd")
        pending.wait()
        comm.all_reduce(output, op=ReduceOp.MAX).wait()
        comm.barrier()
    return float(output.sum())


def test_twenty_runs_are_the_same() -> None:
    """Twenty runs of a program have the same events in the same order, and the same bits."""
    seen = set()
    for _ in range(20):
        torch.manual_seed(7)
        log: Log = []
        results = run_threads(4, _busy, log)
        seen.add((tuple(log), tuple(results)))
    assert len(seen) == 1


def test_one_thread_runs_at_a_time() -> None:
    """Between two waits no other rank runs, even when a rank gives others every chance to."""
    inside: set[int] = set()

    def greedy(comm: Collectives) -> None:
        for _ in range(5):
            assert not inside
            inside.add(comm.rank)
            # This releases the interpreter lock.
            threading.Event().wait(0.002)
            inside.discard(comm.rank)
            comm.barrier()

    run_threads(3, greedy)


def _sum_of(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total = total + value
    return total


@each_row("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_made_in_rank_order_in_the_own_dtype(dtype: torch.dtype) -> None:
    """A reduction is ((x0 + x1) + x2) + x3 in the tensors' dtype, bit for bit, whoever posts last."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(64, generator=generator).to(dtype) for _ in range(4)]
    forward, backward = _sum_of(values), _sum_of(values[::-1])
    # Otherwise the test could not tell the orders apart.
    assert not torch.equal(forward, backward)

    def reduce(comm: Collectives) -> torch.Tensor:
        tensor = values[comm.rank].clone()
        comm.all_reduce(tensor).wait()
        shard = torch.zeros(16, dtype=dtype)
        comm.reduce_scatter(shard, values[comm.rank]).wait()
        assert torch.equal(shard, tensor[16 * comm.rank : 16 * comm.rank + 16])
        return tensor

    late_first = [Fault(rank=0, nth=0, action=Delay(1.0))]
    for faults in ([], late_first):
        for result in run_threads(4, reduce, faults=faults):
            assert torch.equal(result, forward)


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 5),
    numel=st.integers(0, 7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    seed=st.integers(0, 2**16),
)
def test_scatter_then_gather_is_all_reduce(size: int, numel: int, dtype: torch.dtype, seed: int) -> None:
    """For any world and size, reduce_scatter then all_gather has the bits of all_reduce."""

    def both(comm: Collectives) -> bool:
        generator = torch.Generator().manual_seed(seed + comm.rank)
        full = (100 * torch.randn(numel * size, generator=generator)).to(dtype)
        shard, gathered = torch.zeros(numel, dtype=dtype), torch.zeros(numel * size, dtype=dtype)
        comm.reduce_scatter(shard, full).wait()
        comm.all_gather(gathered, shard).wait()
        comm.all_reduce(full).wait()
        return torch.equal(full, gathered)

    assert all(run_threads(size, both))


Start = Callable[[Collectives], tuple[torch.Tensor, Any]]


def _start_gather(comm: Collectives) -> tuple[torch.Tensor, Any]:
    output = torch.full((comm.size,), -1.0)
    return output, comm.all_gather(output, torch.tensor([5.0]))


def _start_scatter(comm: Collectives) -> tuple[torch.Tensor, Any]:
    output = torch.full((1,), -1.0)
    return output, comm.reduce_scatter(output, torch.full((comm.size,), 5.0))


def _start_all_reduce(comm: Collectives) -> tuple[torch.Tensor, Any]:
    output = torch.full((1,), -1.0)
    return output, comm.all_reduce(output)


def _start_broadcast(comm: Collectives) -> tuple[torch.Tensor, Any]:
    output = torch.full((1,), -1.0 if comm.rank else 5.0)
    return output, comm.broadcast(output)


@each_row("start", [_start_gather, _start_scatter, _start_all_reduce, _start_broadcast])
def test_bytes_arrive_in_the_wait_and_not_before(start: Start) -> None:
    """By default an output is unchanged until its own rank waits, though every rank has posted: early reads show."""

    def read_early(comm: Collectives) -> None:
        output, pending = start(comm)
        before = output.clone()
        comm.barrier()
        assert pending.done()
        assert torch.equal(output, before)
        pending.wait()
        assert torch.equal(output, before) == (start is _start_broadcast and comm.rank == 0)

    run_threads(2, read_early)


@each_row("start", [_start_gather, _start_scatter, _start_all_reduce, _start_broadcast])
def test_bytes_can_arrive_as_early_as_possible(start: Start) -> None:
    """With deliver_late=False an output has its value once every rank has posted."""

    def read_early(comm: Collectives) -> None:
        output, pending = start(comm)
        comm.barrier()
        early = output.clone()
        pending.wait()
        assert torch.equal(output, early)
        assert -1.0 not in early.tolist()

    run_threads(2, read_early, deliver_late=False)


def test_asking_whether_it_is_done_lets_others_run() -> None:
    """A rank that polls `done()` gives the others turns, so the answer becomes True."""

    def poll(comm: Collectives) -> int:
        pending = comm.all_reduce(torch.zeros(1))
        asked = 1
        while not pending.done():
            asked += 1
        pending.wait()
        return asked

    asked = run_threads(3, poll)
    assert max(asked) < 5


def test_each_thread_knows_its_collectives() -> None:
    """current_collectives() is the rank's own inside run_threads, and None outside and in other threads."""
    assert current_collectives() is None

    def ask(comm: Collectives) -> bool:
        elsewhere: list[Collectives | None] = []
        thread = threading.Thread(target=lambda: elsewhere.append(current_collectives()))
        thread.start()
        thread.join()
        comm.barrier()
        return current_collectives() is comm and elsewhere == [None]

    assert run_threads(3, ask) == [True] * 3
    assert current_collectives() is None


def _seeded(comm: Collectives) -> list[float]:
    torch.manual_seed(comm.rank)
    drawn = [float(torch.rand(()))]
    comm.barrier()
    drawn.append(float(torch.rand(())))
    comm.barrier()
    drawn.append(float(torch.nn.functional.dropout(torch.ones(100)).sum()))
    return drawn


@pytest.mark.processes
def test_random_numbers_are_those_of_processes() -> None:
    """Each rank has a default generator of its own: what it draws after seeding is what a process would draw."""
    assert run_threads(2, _seeded) == run_processes(2, _seeded)


def test_a_world_leaves_the_callers_generator_alone() -> None:
    """Ranks begin with the caller's random state, and the caller goes on as if there had been no world."""
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    assert run_threads(2, lambda comm: [torch.rand(2).tolist(), comm.barrier()][0]) == [expected] * 2
    assert torch.rand(2).tolist() == expected


def test_backward_runs_in_the_ranks_own_thread() -> None:
    """Hooks of a backward pass run in their rank's thread, may wait for collectives there, and know their world."""

    def train(comm: Collectives) -> float:
        weight = torch.ones(4, requires_grad=True)
        threads = []

        def reduce(grad: torch.Tensor) -> torch.Tensor:
            threads.append(threading.get_ident())
            assert current_collectives() is comm
            total = grad.clone()
            comm.all_reduce(total, label="gradient").wait()
            return total / comm.size

        hidden = weight * (comm.rank + 1.0)
        hidden.register_hook(reduce)
        (hidden * (comm.rank + 1.0)).sum().backward()
        assert threads == [threading.get_ident()]
        assert weight.grad is not None
        return float(weight.grad[0])

    # the mean of 1, 2 and 3 is 2, times each rank's own factor
    assert run_threads(3, train) == [2.0, 4.0, 6.0]


def test_worlds_nest() -> None:
    """A rank may run a world of its own; its collectives and its place in the outer order are as before."""

    def outer(comm: Collectives) -> tuple[int, list[int]]:
        inner = run_threads(2, lambda inner: len(inner.exchange(comm.rank)))
        comm.barrier()
        assert current_collectives() is comm
        return comm.rank, inner

    assert run_threads(2, outer) == [(0, [2, 2]), (1, [2, 2])]


def test_delays_change_the_order_but_not_the_result() -> None:
    """A delayed rank comes after all others, in no time at all, and the numbers stay the same."""
    log: Log = []
    late: Log = []

    def program(comm: Collectives, log: Log) -> list[float]:
        output = torch.zeros(comm.size)
        pending = comm.all_gather(output, torch.tensor([float(comm.rank)]), label="layers.3")
        log.append(f"{comm.rank} posted")
        pending.wait()
        return output.tolist()

    punctual = run_threads(3, program, log)
    delayed = run_threads(3, program, late, faults=[Fault("all_gather", "layers.*", rank=0, action=Delay(3600.0))])
    assert log == ["0 posted", "1 posted", "2 posted"]
    assert late == ["1 posted", "2 posted", "0 posted"]
    assert delayed == punctual


def test_of_two_delays_the_shorter_ends_first() -> None:
    """Delays are lengths of one common clock: the rank with the shorter one goes on first."""
    log: Log = []

    def program(comm: Collectives) -> None:
        comm.barrier(label="start")
        log.append(f"{comm.rank} started")
        comm.barrier(label="end")

    faults = [
        Fault("barrier", "end", rank=0, action=Delay(2.0)),
        Fault("barrier", "start", rank=1, action=Delay(5.0)),
        Fault("barrier", "start", rank=0, action=Delay(7.0)),
    ]
    run_threads(2, program, faults=faults)
    assert log == ["0 started", "1 started"]


def test_a_world_of_one_thread_is_the_world_of_one() -> None:
    """run_threads(1, fn) gives what fn gives with SingleCollectives."""

    def program(comm: Collectives) -> list[Any]:
        output, shard = torch.zeros(3), torch.arange(3.0)
        comm.all_gather(output, shard).wait()
        comm.reduce_scatter(shard, output + 1).wait()
        return [output.tolist(), shard.tolist(), comm.exchange("x"), comm.rank, comm.size]

    assert run_threads(1, program) == [program(SingleCollectives())]
