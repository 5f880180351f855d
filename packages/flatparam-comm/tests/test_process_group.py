"""Process groups: names of several torch versions, and errors of the backend."""

from __future__ import annotations

import functools
import re
import time
import types
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatparam_comm import (
    CollectiveError,
    Collectives,
    CommError,
    ProcessGroupCollectives,
    ReduceOp,
)
from flatparam_comm.process_group import c10d as c10d_names
from flatparam_comm.process_group import groups
from flatparam_comm.testing import BRIEFLY, PATIENCE, run_processes, run_threads

pytestmark = pytest.mark.processes


class _Recorder:
    """Stands for torch.distributed with only some of its names; remembers what was called."""

    def __init__(self, *names: str) -> None:
        self.called: list[str] = []
        self.ReduceOp = types.SimpleNamespace(SUM="sum")
        for name in names:
            setattr(self, name, self._function(name))

    def is_available(self) -> bool:
        return True

    def _function(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> str:
            assert kwargs["async_op"] is True
            self.called.append(name)
            return "work"

        return call


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ("all_gather_into_tensor", "reduce_scatter_tensor"),
            ["all_gather_into_tensor", "reduce_scatter_tensor"],
        ),
        (
            ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single"),
            ["all_gather_single", "reduce_scatter_single"],
        ),
    ],
    ids=["torch 2.11 and 2.12", "torch 2.13"],
)
def test_the_names_of_each_torch_version(monkeypatch: Any, names: tuple[str, ...], expected: list[str]) -> None:
    """The new names are used if torch has them, and otherwise the old ones."""
    recorder = _Recorder(*names)
    monkeypatch.setattr(c10d_names, "dist", recorder)
    group: Any = "group"
    assert c10d_names.all_gather(torch.zeros(1), torch.zeros(1), group) == "work"
    assert c10d_names.reduce_scatter(torch.zeros(1), torch.zeros(1), ReduceOp.SUM, group) == "work"
    assert recorder.called == expected


def test_a_torch_without_any_of_the_names_is_named(monkeypatch: Any) -> None:
    """If torch has none of the names, the error lists them, torch's version and what to do."""
    monkeypatch.setattr(c10d_names, "dist", _Recorder())
    group: Any = "group"
    with pytest.raises(RuntimeError, match=r"one of all_gather_single, all_gather_into_tensor; torch \d.*install"):
        c10d_names.all_gather(torch.zeros(1), torch.zeros(1), group)


def _every_call(comm: ProcessGroupCollectives) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.all_gather(torch.zeros(2), torch.zeros(1)).wait()
        comm.reduce_scatter(torch.zeros(1), torch.zeros(2)).wait()
        comm.all_reduce(torch.zeros(1)).wait()
        comm.broadcast(torch.zeros(1)).wait()
        comm.exchange(1)
        comm.barrier()
        comm.subgroup([0])
    return [str(warning.message) for warning in caught]


def test_nothing_we_call_is_deprecated() -> None:
    """No call warns: neither of deprecation nor of anything else."""
    assert run_processes(2, _every_call) == [[], []]


def test_there_must_be_a_group() -> None:
    """Without a default group the constructor says how to make one."""
    with pytest.raises(ValueError, match=r"found no default one: call torch\.distributed\.init_process_group\(\)"):
        ProcessGroupCollectives()


def _outsider(comm: ProcessGroupCollectives) -> str:
    group = dist.new_group([0])
    if comm.rank == 0:
        assert ProcessGroupCollectives(group).group is group
        return ""
    with pytest.raises(ValueError, match="expected a process group that this process is in") as raised:
        ProcessGroupCollectives(group)
    return str(raised.value)


def test_only_members_of_a_group_can_use_it() -> None:
    """On a process that is not in the group the constructor says so."""
    assert "only on the ranks" in run_processes(2, _outsider)[1]


def _absent_peer(comm: ProcessGroupCollectives) -> Any:
    # All ranks have arrived before a limit is short.
    comm.barrier()
    brief = ProcessGroupCollectives(dist.new_group(timeout=timedelta(seconds=BRIEFLY)))
    pair = brief.subgroup([0, 1])
    assert pair is not None
    # The first collective of a group returns when all of its ranks have come.
    pair.barrier()
    given_up = groups.store_of(comm.group, "given up", timedelta(seconds=PATIENCE))
    if comm.rank == 1:
        # Not in a collective: ranks that wait for each other are told at once.
        given_up.get("rank 0")
        return None
    pending = pair.all_reduce(torch.zeros(1), label="gradient norm")
    assert not pending.done()
    with pytest.raises(CollectiveError) as first:
        pending.wait()
    with pytest.raises(CollectiveError) as second:
        pending.wait()
    assert second.value is first.value
    assert pending.done()
    assert first.value.__cause__ is not None
    given_up.set("rank 0", "")
    error = first.value
    return error.rank, error.op, error.label, str(error)


def test_a_backends_error_names_rank_call_and_label() -> None:
    """A collective that a peer never joins is a CollectiveError on each wait; a subgroup has its parent's timeout."""
    rank, op, label, text = run_processes(2, _absent_peer)[0]
    # The limit is the parent's, not the half hour that torch gives a new group.
    assert f"{BRIEFLY}000ms" in text
    assert (rank, op, label) == (0, "all_reduce", "gradient norm")
    assert text.startswith("rank 0: all_reduce 'gradient norm': the process group failed with ")
    # With flatparam-guard the error names the rank that is missing.
    late = r"not there: rank 1 \(process \d+\), whose last collective was barrier"
    assert re.search(f"{late}|look for the first error among the other ranks", text), text


def _unpicklable(comm: ProcessGroupCollectives) -> str:
    with pytest.raises(CollectiveError, match=r"rank \d: exchange 'facts'") as raised:
        comm.exchange(lambda: None, label="facts")
    return type(raised.value.__cause__).__name__


def test_what_cannot_be_pickled_is_an_error_of_the_exchange() -> None:
    """An unpicklable value is reported with the label of the exchange, before anything is sent."""
    for name in run_processes(2, _unpicklable):
        assert name in ("PicklingError", "AttributeError")


def _nested(comm: ProcessGroupCollectives) -> Any:
    pair = comm.subgroup([1, 2])
    # Only these two make this group. torch's new_group() counts groups on each rank by default, so that the next group
    # of everyone would have another name on rank 0, and never come to be.
    alone = None if pair is None else pair.subgroup([1])
    ends = comm.subgroup([0, 2])
    return [None if group is None else group.exchange(comm.rank) for group in (pair, alone, ends)]


def test_a_subgroup_of_a_subgroup_needs_only_its_own_ranks() -> None:
    """Making a group inside a group involves the ranks of that group only, and later groups are as if it were not."""
    assert run_processes(3, _nested) == [
        [None, None, [0, 2]],
        [[1, 2], None, None],
        [[1, 2], [2], [0, 2]],
    ]


def _overlapping(comm: ProcessGroupCollectives) -> Any:
    trio = comm.subgroup([0, 1, 2])
    if trio is None:
        return None
    # When the second one is made, rank 1 has made one more before than rank 2 has.
    pairs = [trio.subgroup(ranks) for ranks in ([0, 1], [1, 2], [0, 1])]
    return [None if pair is None else pair.exchange(comm.rank) for pair in pairs]


def test_subgroups_of_a_subgroup_may_overlap() -> None:
    """A group inside a group comes to be although its ranks have made different numbers of groups before."""
    assert run_processes(4, _overlapping) == [
        [[0, 1], None, [0, 1]],
        [[0, 1], [1, 2], [0, 1]],
        [None, [1, 2], None],
        None,
    ]


def _float_bits(comm: Any) -> list[float]:
    generator = torch.Generator().manual_seed(comm.rank)
    full = torch.randn(1000, generator=generator)
    shard = torch.zeros(500)
    comm.reduce_scatter(shard, full).wait()
    comm.all_reduce(full).wait()
    return [*shard.tolist(), *full.tolist()]


def test_two_ranks_have_the_same_bits_as_threads() -> None:
    """With two ranks, sums over gloo and over threads are equal bit for bit."""
    assert run_processes(2, _float_bits) == run_threads(2, _float_bits)


def _after_the_end(group: ProcessGroupCollectives) -> tuple[str, str, int]:
    """Destroy the group after an optimizer's step, and look what is left of it."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = group.exchange(torch.ones(2), label="gradient")[0]
    torch.optim.AdamW([parameter]).step()
    dist.barrier()
    dist.destroy_process_group()
    deadline = time.monotonic() + 60
    while _gloo_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(CommError, match="has been destroyed") as caught:
        group.exchange(1)
    return repr(group), str(caught.value), _gloo_threads()


def _gloo_threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        # It may end meanwhile.
        with suppress(OSError):
            count += "gloo" in (task / "comm").read_text()
    return count


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_destroyed_group_is_gone() -> None:
    """Nothing holds a group that was destroyed, also not torch.optim: gloo's threads end, and using it says so."""
    for shown, _, threads in run_processes(2, _after_the_end):
        assert shown == "ProcessGroupCollectives(destroyed)"
        assert threads == 0


def _groups_inside(collectives: Collectives) -> list[object]:
    """What torch would split the communicator of new groups from: of one in the world, and of one inside that."""
    module: Any = dist.distributed_c10d
    makes, found = dist.new_group, []

    def make(*args: Any, **kwargs: Any) -> Any:
        # What torch does if the default group is bound to a device. No device of a CPU can be bound.
        found.append(module._get_split_source(dist.group.WORLD))
        return makes(*args, **kwargs)

    module._get_split_source = lambda group: "the world's"
    dist.new_group = make
    half = collectives.subgroup([0, 1])
    inner = None if half is None else half.subgroup([1])
    assert (inner is not None) == (collectives.rank == 1)
    assert module._get_split_source(dist.group.WORLD) == "the world's"
    return found


def test_a_group_inside_a_group_splits_nothing_off_the_world() -> None:
    """Only members make a group inside a smaller one, so torch may not split the world's communicator for it.

    A split waits for every rank of the world, and those outside of the smaller group never call.
    """
    alone = ["the world's"]
    assert run_processes(3, _groups_inside) == [alone, [*alone, None], alone]


def _of_one(collectives: Collectives) -> list[Any]:
    """What collectives of a group of one rank give, and which of torch's are called."""
    alone = [collectives.subgroup([rank]) for rank in range(collectives.size)][collectives.rank]
    assert isinstance(alone, ProcessGroupCollectives)
    called: list[str] = []
    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
        setattr(c10d_names, name, lambda *_, name=name, **__: called.append(name))
    given, output = torch.arange(4.0), torch.zeros(4)
    found: list[Any] = []
    to_all = functools.partial(alone.all_to_all, output_numels=[4], given_numels=[4])
    for copy in (alone.all_gather, alone.reduce_scatter, to_all):
        pending = copy(output, given)
        found.append((output.tolist(), pending.done()))
        given += 1
    for stay in (alone.all_reduce, alone.broadcast):
        found.append((output.tolist(), stay(output).done()))
    with pytest.raises(ValueError, match="expected output.numel"):
        alone.all_gather(torch.zeros(3), given)
    return [found, called]


def test_a_group_of_one_rank_does_not_call_its_backend() -> None:
    """Collectives of one rank copy, are complete at once, check what they are given, and call nothing of torch."""
    values = [0.0, 1.0, 2.0, 3.0]
    later = [[each + n for each in values] for n in (0, 1, 2, 2, 2)]
    assert run_processes(2, _of_one) == [[[(each, True) for each in later], []]] * 2


def _references(comm: Collectives) -> list[tuple[int, int]]:
    """The references to the memory of an output before and after its collective is issued, while a `Work` has it."""

    def found(tensor: torch.Tensor) -> int:
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    told = []
    for in_place in (False, True):
        output = torch.zeros(4 * comm.size)
        shard = output[4 * comm.rank :][:4].fill_(comm.rank) if in_place else torch.full((4,), float(comm.rank))
        before = found(output)
        pending = comm.all_gather(output, shard)
        told.append((before, found(output)))
        pending.wait()
        assert output.tolist() == [float(rank) for rank in range(comm.size) for _ in range(4)]
    output, given = torch.zeros(comm.size), torch.full((comm.size,), float(comm.rank))
    before = found(output)
    sizes = [1] * comm.size
    pending = comm.all_to_all(output, given, output_numels=sizes, given_numels=sizes)
    told.append((before, found(output)))
    pending.wait()
    assert output.tolist() == [*map(float, range(comm.size))]
    return told


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_backend_has_no_reference_to_the_memory_of_an_output(ranks: int) -> None:
    """Who counts the references to a gathered buffer does not find those of gloo's thread, which go when they may."""
    for told in run_processes(ranks, _references):
        assert [before == after for before, after in told] == [True] * 3


def _dropped(comm: Collectives) -> float:
    """Gather into memory that nobody but the pending has, while others make and free memory of the same size."""
    pendings = []
    for step in range(20):
        output = torch.zeros(50_000 * comm.size)
        pendings.append((output.data_ptr(), comm.all_gather(output, torch.full((50_000,), float(step)))))
        del output
    taken = {torch.empty(50_000 * comm.size).data_ptr() for _ in range(20)}
    assert taken.isdisjoint(address for address, _ in pendings)
    for _, pending in pendings:
        pending.wait()
    return comm.size


def test_memory_lives_as_long_as_something_is_written_to_it() -> None:
    """The memory of an output that the caller has dropped is not given to anybody else before the gather is over."""
    assert run_processes(2, _dropped) == [2, 2]
