"""The groups that share memory: names, pairs, meshes, hosts; and the errors of those that cannot."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flatparam_comm import (
    Collectives,
    ProcessGroupCollectives,
    SharedMemoryCollectives,
    SingleCollectives,
    Topology,
    engine_of,
    process_group_of,
    resolve_topology,
    shared_memory,
    with_shared_memory,
)
from flatparam_comm.testing import run_processes, run_threads
from flatparam_onehost import host as shared_host

processes = pytest.mark.processes


def _kinds(topology: Topology) -> list[str]:
    groups = [topology.shard] if topology.replicate is None else [topology.shard, topology.replicate]
    return [type(group).__name__.removesuffix("Collectives") for group in groups]


def _members(group: Collectives | None) -> list[int]:
    assert group is not None
    return group.exchange(dist.get_rank())


def _pretend(host: str) -> None:
    """Be on another host."""
    shared_host.host_identity = lambda: (host, host, "")  # type: ignore[assignment]
    from flatparam_comm.topology import resolving

    resolving.host_identity = shared_host.host_identity  # type: ignore[attr-defined]


def _by_name(comm: ProcessGroupCollectives) -> None:
    named = resolve_topology("shared_memory")
    assert _kinds(named) == ["SharedMemory"]
    assert _members(named.shard) == [0, 1]
    assert resolve_topology("auto").shard is named.shard
    assert shared_memory(comm) is named.shard
    assert shared_memory(comm.group) is named.shard
    assert shared_memory(named.shard) is named.shard
    assert process_group_of(named.shard) is comm.group
    assert engine_of(named.shard) == comm


@processes
def test_a_name_is_enough() -> None:
    """'shared_memory' and 'auto' are the default group's ranks, one object each time; its process group is behind."""
    run_processes(2, _by_name)


def _on_two_hosts(comm: ProcessGroupCollectives) -> list[str]:
    _pretend(f"host-{comm.rank // 2}")
    assert resolve_topology("auto").shard == comm
    with pytest.raises(ValueError, match="on several hosts") as raised:
        resolve_topology("shared_memory")
    world = dist.new_group([0, 1, 2, 3])
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    pair = resolve_topology(("shared_memory", columns[comm.rank % 2]))
    assert _kinds(pair) == ["SharedMemory", "ProcessGroup"]
    assert _members(pair.shard) == ([0, 1] if comm.rank < 2 else [2, 3])
    assert resolve_topology(("auto", columns[comm.rank % 2])).shard is pair.shard
    again = with_shared_memory(Topology(ProcessGroupCollectives(world)))
    assert _kinds(again) == ["ProcessGroup"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    square = with_shared_memory(resolve_topology(mesh))
    assert _kinds(square) == ["SharedMemory", "ProcessGroup"]
    assert square.mesh is mesh
    total = torch.tensor([float(comm.rank)])
    square.shard.all_reduce(total).wait()
    assert square.replicate is not None
    square.replicate.all_reduce(total).wait()
    assert total.item() == 6.0
    restored: Topology = pickle.loads(pickle.dumps(square))
    assert _kinds(restored) == _kinds(square)
    return [str(raised.value)]


@processes
def test_only_ranks_of_one_host_share_memory() -> None:
    """Across hosts 'auto' is the process group and 'shared_memory' an error; a pair or a mesh shares inside each host."""
    for text in run_processes(4, _on_two_hosts):
        assert "rank 0 is on host-0, rank 2 on host-1" in text[0]


def _one_cannot(comm: ProcessGroupCollectives) -> str:
    if comm.rank == 1:
        shared_host._NEEDED = ("no_such_function",)  # type: ignore[misc]
    assert resolve_topology("auto").shard == comm
    with pytest.raises(ValueError, match="expected ranks that can share memory") as raised:
        shared_memory(comm)
    return str(raised.value)


@processes
def test_every_rank_says_the_same_when_one_cannot() -> None:
    """If one rank's system lacks what is needed, all ranks have the same error, which names that rank."""
    first, second = run_processes(2, _one_cannot)
    assert first == second
    assert "rank 1: shared memory needs Linux (memfd_create, pidfd_open)" in first


def _cannot_open(comm: ProcessGroupCollectives) -> str:
    if comm.rank == 1:

        def refuse(*args: Any) -> Any:
            raise PermissionError("not yours")

        shared_host.SharedSegment.open = refuse  # type: ignore[method-assign]
    assert resolve_topology("auto").shard == comm
    with pytest.raises(ValueError, match="cannot be opened: not yours") as raised:
        shared_memory(comm)
    return str(raised.value)


@processes
def test_memory_that_cannot_be_opened_is_told_by_all() -> None:
    """If one rank may not open the others' memory, all ranks go without it and name that rank."""
    first, second = run_processes(2, _cannot_open)
    assert first == second
    assert "rank 1: its peers' memory" in first


def _subgroups(comm: ProcessGroupCollectives) -> Any:
    shared = shared_memory(comm)
    pair = shared.subgroup([0, 2])
    assert (pair is None) == (comm.rank == 1)
    if pair is None:
        return None
    assert isinstance(pair, SharedMemoryCollectives)
    value = torch.tensor([comm.rank])
    pair.broadcast(value, root=1).wait()
    alone = pair.subgroup([0])
    assert (alone is None) == (comm.rank != 0)
    return pair.exchange(comm.rank), value.item()


@processes
def test_subgroups_share_memory_too() -> None:
    """A subgroup of ranks that share memory shares memory of its own, and nests."""
    assert run_processes(3, _subgroups) == [([0, 2], 2), None, ([0, 2], 2)]


def test_a_world_of_threads_needs_none() -> None:
    """In a world of threads 'auto' is that world, and 'shared_memory' an error that says what it is for."""

    def program(comm: Collectives) -> bool:
        with pytest.raises(ValueError, match=r"found ThreadCollectives.*for the processes of a process group"):
            resolve_topology("shared_memory")
        return resolve_topology("auto").shard is comm

    assert run_threads(2, program) == [True, True]


def test_other_engines_stay_as_they_are() -> None:
    """A topology of other engines is the same after `with_shared_memory`."""
    topology = Topology(SingleCollectives(), SingleCollectives())
    assert with_shared_memory(topology) == topology
    with pytest.raises(TypeError, match="'auto', 'shared_memory', .*found str 'shared-memory'"):
        resolve_topology("shared-memory")


def _in_place_of_gpus(comm: ProcessGroupCollectives) -> str:
    shared_host.groups.has_cpu_backend = lambda group: False  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no backend for CPU tensors") as raised:
        shared_memory(comm)
    return str(raised.value)


@processes
def test_a_group_for_gpus_only_is_named() -> None:
    """A process group without a backend for CPU tensors is an error that says how to make one with it."""
    assert "'cpu:gloo,cuda:nccl'" in run_processes(1, _in_place_of_gpus)[0]
