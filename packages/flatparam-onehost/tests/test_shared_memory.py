"""Collectives through shared memory: any order of waits, any size, the bits of threads, and what is held."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist
from each_row import each_row
from torch import Tensor

from flatparam_comm import (
    REDUCIBLE,
    ByteLedger,
    CollectiveError,
    Collectives,
    CommError,
    Pending,
    ProcessGroupCollectives,
    RecordingCollectives,
    ReduceOp,
    SharedMemoryCollectives,
    resolve_topology,
    shared_memory,
    takes_parts,
)
from flatparam_comm.testing import run_processes, run_threads
from flatparam_onehost.moves import OPS, PostedCall
from flatparam_onehost.segment import SLOTS

processes = pytest.mark.processes
PAGE = os.sysconf("SC_PAGE_SIZE")
SIZES = (0, 1, 7, 64, 1000, 5000, 40_000)


@attrs.frozen
class Torn:
    """A flat tensor in parts of seven elements, each in memory of its own."""

    whole: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def numel(self) -> int:
        return self.whole.numel()

    def fill(self, start: int, out: Tensor) -> None:
        parts = [part.clone() for part in self.whole[start : start + out.numel()].split(7)]
        if parts:
            torch.cat(parts, out=out)


class Program:
    """A random program of collectives: calls are the same on every rank, waits come in an order of the rank's own."""

    def __init__(self, comm: Collectives, seed: int) -> None:
        self.comm = comm
        self.shared = random.Random(seed)
        self.own = random.Random(seed * 1000 + comm.rank)
        self.pending: list[tuple[Pending, Tensor]] = []
        self.results: dict[int, list[int]] = {}
        self.number = 0

    def run(self, calls: int) -> dict[int, list[int]]:
        """The bytes of every result, by the number of its call."""
        outputs: dict[int, tuple[Pending, Tensor]] = {}
        for number in range(calls):
            outputs[number] = self.call()
            if self.own.random() < 0.3:
                for number in self.own.sample(sorted(outputs), self.own.randint(1, len(outputs))):
                    self.end(number, outputs)
            if self.shared.random() < 0.1:
                assert self.comm.exchange(self.comm.rank) == list(range(self.comm.size))
        for number in self.own.sample(sorted(outputs), len(outputs)):
            self.end(number, outputs)
        return self.results

    def end(self, number: int, outputs: dict[int, tuple[Pending, Tensor]]) -> None:
        """Wait for one of them."""
        pending, output = outputs.pop(number)
        pending.wait()
        self.results[number] = output.view(-1).view(torch.uint8)[:400].tolist()

    def values(self, numel: int, dtype: torch.dtype) -> Tensor:
        """This rank's numbers for the next call."""
        self.number += 1
        generator = torch.Generator().manual_seed(self.number * 100 + self.comm.rank)
        return (torch.randn(numel, generator=generator) * 10).to(dtype)

    def call(self) -> tuple[Pending, Tensor]:
        """Start the next collective."""
        comm, chosen = self.comm, self.shared
        numel = chosen.choice(SIZES)
        kind = chosen.choice(["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
        dtype = chosen.choice(sorted(REDUCIBLE, key=str))
        op = ReduceOp.SUM if dtype.is_complex else chosen.choice(list(ReduceOp))
        in_place = chosen.random() < 0.5
        whole, part = self.values(numel * comm.size, dtype), self.values(numel, dtype)
        mine = whole[comm.rank * numel : (comm.rank + 1) * numel]
        root = chosen.randrange(comm.size)
        if kind == "all_gather":
            return comm.all_gather(whole, mine if in_place else part), whole
        if kind == "reduce_scatter":
            if op is ReduceOp.SUM and takes_parts(comm) and (self.number // 2 + comm.rank) % 2:
                return comm.reduce_scatter_parts(part, Torn(whole)), part
            target = mine if in_place else part
            return comm.reduce_scatter(target, whole, op=op), target
        if kind == "all_reduce":
            return comm.all_reduce(part, op=op), part
        return comm.broadcast(part, root=root), part


def _programs(comm: Collectives, seeds: list[int]) -> list[dict[int, list[int]]]:
    shared = shared_memory(comm) if isinstance(comm, ProcessGroupCollectives) else comm
    return [Program(shared, seed).run(40) for seed in seeds]


@processes
@each_row("size", [1, 2, 3, 4])
def test_random_programs_have_the_bits_of_threads(size: int) -> None:
    """Any program of collectives gives the same bytes as on threads, whatever each rank waits for first."""
    seeds = [1, 2, 3]
    assert run_processes(size, _programs, seeds) == run_threads(size, _programs, seeds)


def _recorded(comm: Collectives) -> tuple[bool, list[tuple[str, int, int]], Tensor]:
    plain = takes_parts(RecordingCollectives(comm, ByteLedger()))
    ledger = ByteLedger(keep=True)
    group = RecordingCollectives(shared_memory(comm), ledger)
    assert takes_parts(group)
    output = torch.empty(3)
    group.reduce_scatter_parts(output, Torn(torch.arange(6.0) * (comm.rank + 1)), label="L").wait()
    found = [(each.op, each.payload_nbytes, each.sent_nbytes) for each in ledger.transfers]
    return plain, found, output


@processes
def test_parts_are_entered_in_a_ledger() -> None:
    """Parts count as the flat tensor; over an engine that takes no parts, the recording one takes none either."""
    for rank, (plain, found, output) in enumerate(run_processes(2, _recorded)):
        assert not plain
        assert found == [("reduce_scatter", 24, 12)]
        assert output.tolist() == [9.0 * rank, 9.0 * rank + 3, 9.0 * rank + 6]


def _refused(comm: Collectives) -> list[str]:
    shared = shared_memory(comm)
    said = []
    for output, full in (
        (torch.zeros(3), torch.zeros(7)),
        (torch.zeros(3), torch.zeros(6, dtype=torch.float64)),
        (torch.zeros(3, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)),
        (torch.zeros(3, 1), torch.zeros(6)),
    ):
        with pytest.raises(ValueError, match="expected") as caught:
            shared.reduce_scatter_parts(output, Torn(full), label="L")
        said.append(str(caught.value))
    # No collective is under way.
    shared.barrier()
    return said


@processes
def test_parts_that_cannot_be_reduced_are_refused() -> None:
    """Too many elements, a different dtype, one without a sum and a different shape are refused before sending."""
    for rank, said in enumerate(run_processes(2, _refused)):
        begin = f"rank {rank} of 2: reduce_scatter 'L': expected "
        expected = "parts of 6 x float32 on cpu for an output of 3 elements on cpu, found parts of "
        assert said[0] == begin + expected + "7 x float32 on cpu"
        assert said[1] == begin + expected + "6 x float64 on cpu"
        assert "torch.bool" in said[2]
        assert said[3].startswith(begin + "output to be 1-D")


def _fenced(comm: Collectives, seeds: list[int]) -> list[dict[int, list[int]]]:
    sys.modules["flatparam_onehost.engine"]._KEEPS_ORDER = False  # type: ignore[attr-defined]
    return _programs(comm, seeds)


@processes
def test_processors_that_reorder_writes_are_told_not_to() -> None:
    """With the fences that other processors than x86 need, programs give the same."""
    assert run_processes(2, _fenced, [4]) == run_threads(2, _programs, [4])


def _runs_ahead(comm: ProcessGroupCollectives) -> list[float]:
    shared = shared_memory(comm)
    tensors = [torch.tensor([float(comm.rank + index)]) for index in range(5 * SLOTS)]
    pendings = [shared.all_reduce(tensor) for tensor in tensors]
    first = pendings[0]
    # Its slot was needed, so the first is over.
    assert first.done()
    order = pendings if comm.rank else pendings[::-1]
    for pending in order:
        pending.wait()
    return [tensor.item() for tensor in tensors]


@processes
def test_more_calls_than_slots_may_be_pending() -> None:
    """Any number of collectives may be started before the first wait; the engine ends the oldest when it must."""
    expected = [2.0 * index + 1 for index in range(5 * SLOTS)]
    assert run_processes(2, _runs_ahead) == [expected] * 2


def _crossed(comm: ProcessGroupCollectives) -> float:
    one, other = shared_memory(comm), shared_memory(dist.new_group([0, 1]))
    value = torch.ones(1)
    crossing = torch.ones(1)
    held = [one.all_reduce(torch.ones(1)) for _ in range(SLOTS)]
    if comm.rank == 0:
        # This call needs the slot of the first one, which rank 1 has not waited for.
        held.append(one.all_reduce(value))
        other.all_reduce(crossing).wait()
    else:
        other.all_reduce(crossing).wait()
        held.append(one.all_reduce(value))
    for pending in held:
        pending.wait()
    return value.item() + crossing.item()


@processes
def test_groups_go_on_while_one_of_them_waits() -> None:
    """Ranks may use two groups in different orders: a rank that waits for one finishes what is ready in the other."""
    assert run_processes(2, _crossed) == [4.0, 4.0]


def _dropped(comm: ProcessGroupCollectives) -> float:
    shared = shared_memory(comm)
    for _ in range(3 * SLOTS):
        # No rank waits for it.
        shared.all_gather(torch.zeros(200), torch.ones(100))
    value = torch.ones(1)
    shared.all_reduce(value).wait()
    return value.item()


@processes
def test_pendings_may_be_dropped() -> None:
    """A pending that nobody waits for does not hold up the calls after it."""
    assert run_processes(2, _dropped) == [2.0, 2.0]


def _infers(comm: ProcessGroupCollectives) -> list[list[float]]:
    shared = shared_memory(comm)
    with torch.inference_mode():
        outputs = [torch.zeros(200) for _ in range(SLOTS)]
        pendings = [shared.all_gather(output, torch.full((100,), comm.rank + 1.0)) for output in outputs]
    for pending in pendings:
        pending.wait()
    for _ in range(SLOTS):
        outputs.append(torch.zeros(200))
        shared.all_gather(outputs[-1], torch.full((100,), comm.rank + 1.0)).wait()
    return [output[::100].tolist() for output in outputs]


@processes
def test_inference_mode_may_begin_and_end_between() -> None:
    """A collective that is issued in inference mode may be waited for outside; training may reuse its sizes."""
    assert run_processes(2, _infers) == [[[1.0, 2.0]] * (2 * SLOTS)] * 2


def _closes_early(comm: ProcessGroupCollectives) -> str:
    shared = shared_memory(comm)
    shared.barrier()
    if comm.rank == 1:
        shared.close()
        return ""
    with pytest.raises(CollectiveError, match="rank 1 no longer takes part") as raised:
        for _ in range(2):
            shared.barrier(label="end")
    return raised.value.label


@processes
def test_a_rank_that_has_closed_is_missed_at_once() -> None:
    """A rank that waits for one that has closed its memory is told so, without waiting for the timeout."""
    assert run_processes(2, _closes_early) == ["end", ""]


def _held(comm: ProcessGroupCollectives) -> None:
    shared = shared_memory(comm)
    n = comm.size
    assert shared.held_nbytes == PAGE

    def both_slots(call: Callable[[], Pending]) -> None:
        for _ in range(SLOTS):
            call().wait()
        # All ranks have written.
        shared.barrier()
        for _ in range(SLOTS - 1):
            # Each slot gets the same calls again.
            shared.barrier()

    def check(slot_nbytes: int) -> None:
        expected = PAGE + SLOTS * -(-slot_nbytes // PAGE) * PAGE
        held = os.fstat(shared._link.segment.fd).st_blocks * 512
        assert (shared.held_nbytes, held) == (expected, expected), (shared.held_nbytes, held, expected)
        shared.barrier()
        for _ in range(SLOTS - 1):
            shared.barrier()

    numel = 10_000
    both_slots(lambda: shared.broadcast(torch.zeros(numel)))
    check(4 * numel)
    both_slots(lambda: shared.all_gather(torch.zeros(n * numel), torch.zeros(numel)))
    check(4 * n * numel)
    both_slots(lambda: shared.broadcast(torch.zeros(5)))
    check(4 * n * numel)
    both_slots(lambda: shared.reduce_scatter(torch.zeros(2 * numel), torch.zeros(2 * n * numel)))
    check(4 * (n - 1) * 2 * n * numel)
    both_slots(lambda: shared.all_reduce(torch.zeros(3 * n * numel)))
    check(4 * n * 3 * n * numel)


@processes
@each_row("size", [2, 3])
def test_what_is_held_is_the_formula(size: int) -> None:
    """The group holds a page and, for each slot, the most that a collective needed: so says it, and so the system."""
    run_processes(size, _held)


def _big(comm: ProcessGroupCollectives) -> None:
    shared = shared_memory(comm)
    numel = 5_000_001
    output = torch.zeros(2 * numel)
    pending = shared.all_gather(output, torch.full((numel,), comm.rank + 1.0))
    total, full = torch.zeros(numel), torch.full((2 * numel,), comm.rank + 1.0)
    shared.reduce_scatter(total, full).wait()
    pending.wait()
    assert output[:numel].eq(1).all()
    assert output[numel:].eq(2).all()
    assert total.eq(3).all()


@processes
def test_messages_may_be_big() -> None:
    """Slots grow to the size of any message."""
    run_processes(2, _big)


def _descriptors(named: str = "memfd:flatparam (") -> list[str]:
    held = []
    for name in os.listdir("/proc/self/fd"):
        try:
            held.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            # The descriptor was that of the listing itself.
            continue
    return sorted(name for name in held if named in name or "pidfd" in name)


def _closes(comm: ProcessGroupCollectives) -> None:
    shared = shared_memory(comm)
    for _ in range(SLOTS):
        shared.all_reduce(torch.zeros(100_000)).wait()
    assert not [name for name in os.listdir("/dev/shm") if "flatparam" in name]
    # The descriptors are those of the segment, its words, its slots and the other process.
    assert len(_descriptors()) == 3 + SLOTS, _descriptors()
    comm.barrier()
    shared.close()
    shared.close()
    assert shared.is_closed
    assert _descriptors() == []
    gc.collect()
    assert "memfd:flatparam (" not in Path("/proc/self/maps").read_text()
    for call in (lambda: shared.all_reduce(torch.zeros(1)), lambda: shared.exchange(1), shared.barrier):
        with pytest.raises(CommError, match="found it closed"):
            call()
    again = shared_memory(comm)
    assert again is not shared
    again.barrier()


@processes
def test_closing_gives_everything_back() -> None:
    """After close() no descriptor is open, further calls say why they fail, and memory can be shared anew."""
    run_processes(2, _closes)


def _destroyed(comm: ProcessGroupCollectives) -> None:
    shared = resolve_topology("auto").shard
    assert isinstance(shared, SharedMemoryCollectives)
    shared.barrier()
    comm.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert shared.is_closed
    # Nor is the memory of the positions left, which a relay has.
    assert _descriptors("memfd:flatparam") == []
    with pytest.raises(CommError, match="destroy_process_group"):
        shared.barrier()


@processes
def test_it_ends_with_its_process_group() -> None:
    """destroy_process_group() closes the shared memory over it."""
    run_processes(2, _destroyed)


def _forks(comm: ProcessGroupCollectives) -> int:
    shared = shared_memory(comm)
    shared.barrier()
    pid = os.fork()
    if pid == 0:
        try:
            shared.barrier()
        except CommError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    shared.barrier()
    return code


@processes
def test_a_forked_process_is_no_rank() -> None:
    """A process that a rank forks (a data loader's worker) cannot call collectives in its name, and disturbs nothing."""
    assert run_processes(2, _forks) == [0, 0]


@each_row("op", OPS)
def test_calls_have_codes(op: str) -> None:
    """A call is told by a number of 63 bits, and is the same when it is read again."""
    for dtype in (torch.float32, torch.complex128, torch.float8_e5m2):
        for numel, detail in ((0, 0), ((1 << 40) - 1, 2)):
            call = PostedCall(op, dtype, numel, detail)
            assert 0 <= call.code < 1 << 63
            assert PostedCall.of(call.code) == call
            assert str(call).startswith(op)
