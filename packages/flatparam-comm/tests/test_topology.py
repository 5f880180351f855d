"""Topologies: what a user passes, and which groups it means."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import pytest
import torch.distributed as dist
from each_row import each_row
from torch.distributed.device_mesh import init_device_mesh

from flatparam_comm import (
    Collectives,
    MismatchError,
    ProcessGroupCollectives,
    SingleCollectives,
    Topology,
    resolve_topology,
)
from flatparam_comm.testing import rectangle, run_processes, run_threads


def test_in_a_rank_thread_the_default_is_its_world() -> None:
    """Without an argument, in a world of threads, the shard group is that world."""

    def program(comm: Collectives) -> bool:
        topology = resolve_topology()
        return topology.shard is comm and topology.replicate is None and topology.data_parallel_size == 3

    assert run_threads(3, program) == [True] * 3


def test_without_any_world_the_error_says_how_to_start() -> None:
    """Without an argument and without a group, the error names torchrun, run_threads and SingleCollectives."""
    with pytest.raises(ValueError, match=r"torchrun.*init_process_group.*run_threads.*SingleCollectives") as raised:
        resolve_topology()
    assert "found no process group" in str(raised.value)


def test_collectives_and_pairs_are_taken_as_they_are() -> None:
    """Collectives are the shard group; of a pair the second is the replicate group."""
    one, other = SingleCollectives(), SingleCollectives()
    assert resolve_topology(one).shard is one
    assert resolve_topology(one).replicate is None
    pair = resolve_topology((one, other))
    assert pair.shard is one
    assert pair.replicate is other


def test_data_parallel_size_is_the_product() -> None:
    """Gradients are averaged over shard size times replicate size."""

    def program(comm: Collectives) -> int:
        low, high = comm.subgroup([0, 1]), comm.subgroup([2, 3])
        shard = low or high
        assert shard is not None
        return Topology(shard, comm).data_parallel_size

    assert run_threads(4, program) == [8] * 4


@each_row("given", ["world", 3, [SingleCollectives()], object()], ids=lambda given: type(given).__name__)
def test_anything_else_is_a_type_error(given: Any) -> None:
    """Any other argument is a TypeError that lists what can be passed and names the type found."""
    with pytest.raises(TypeError, match=f"DeviceMesh, found {type(given).__name__}"):
        resolve_topology(given)


def test_a_tuple_is_a_pair() -> None:
    """A tuple of any other length is a ValueError that says which is which."""
    with pytest.raises(ValueError, match=r"a pair \(shard group, replicate group\), found a tuple of 3"):
        resolve_topology((SingleCollectives(),) * 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="found str"):
        resolve_topology((SingleCollectives(), "x"))  # type: ignore[arg-type]


def test_a_topology_cannot_be_changed() -> None:
    """A topology is a fact."""
    topology = Topology(SingleCollectives())
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        topology.replicate = SingleCollectives()  # type: ignore[misc]


def _members(collectives: Collectives | None) -> list[int] | None:
    return None if collectives is None else collectives.exchange(dist.get_rank())


def _resolve_groups(comm: ProcessGroupCollectives) -> dict[str, Any]:
    found: dict[str, Any] = {}
    default = resolve_topology()
    assert isinstance(default.shard, ProcessGroupCollectives)
    found["default is WORLD"] = default.shard.group is dist.group.WORLD
    group = dist.new_group([0, 2])
    if comm.rank in (0, 2):
        found["group"] = _members(resolve_topology(group).shard)
    else:
        with pytest.raises(ValueError, match="expected a process group that this process is in"):
            resolve_topology(group)
    line = resolve_topology(init_device_mesh("cpu", (4,)))
    found["line"] = (_members(line.shard), _members(line.replicate))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    square = resolve_topology(mesh)
    found["square"] = (_members(square.shard), _members(square.replicate), square.data_parallel_size)
    found["slice"] = _members(resolve_topology(mesh["shard"]).shard)
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"found 3 of them: \('a', 'b', 'c'\)"):
        resolve_topology(cube)
    shard, replicate = mesh.get_group("shard"), mesh.get_group("replicate")
    assert resolve_topology((shard, replicate)).data_parallel_size == 4
    for pair in ((dist.group.WORLD, dist.group.WORLD), (shard, shard), (shard, dist.group.WORLD)):
        with pytest.raises(ValueError, match=r"expected a pair .* that have this rank in common and no other, found"):
            resolve_topology(pair)
    return found


@pytest.mark.processes
def test_process_groups_and_meshes() -> None:
    """A group shards over itself; a mesh of one dimension over it; of two, it shards over 1 and replicates over 0."""
    everyone = run_processes(4, _resolve_groups)
    for rank, found in enumerate(everyone):
        assert found["default is WORLD"]
        assert found.get("group") == ([0, 2] if rank in (0, 2) else None)
        assert found["line"] == ([0, 1, 2, 3], None)
        row, column = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        assert found["square"] == (row, column, 4)
        assert found["slice"] == row


@each_row("shards", [None, 1, 2, 4])
def test_a_pickled_topology_is_that_of_a_world_of_the_same_size(shards: int | None) -> None:
    """Read in a world of the same size, on the same rank, it has groups of the same ranks."""

    def save(world: Collectives) -> tuple[bytes, list[int], list[int]]:
        topology = Topology(world) if shards is None else rectangle(world, shards)
        others = [] if topology.replicate is None else topology.replicate.exchange(world.rank)
        return pickle.dumps(topology), topology.shard.exchange(world.rank), others

    saved = run_threads(4, save)

    def load(world: Collectives) -> None:
        words, within, across = saved[world.rank]
        topology: Topology = pickle.loads(words)
        assert topology.shard.exchange(world.rank) == within
        assert (topology.replicate is None) == (not across)
        if topology.replicate is not None:
            assert topology.replicate.exchange(world.rank) == across

    run_threads(4, load)

    def load_elsewhere(world: Collectives) -> None:
        with pytest.raises(ValueError, match=r"can be read on that rank only.*save its state_dict\(\) instead"):
            pickle.loads(saved[(world.rank + 1) % 4][0])

    run_threads(4, load_elsewhere)
    run_threads(2, load_elsewhere)


@each_row("replicate", [None, SingleCollectives()])
def test_a_pickled_topology_of_one_rank(replicate: Collectives | None) -> None:
    """Read anywhere, without any world, it is one rank again."""
    found: Topology = pickle.loads(pickle.dumps(Topology(SingleCollectives(), replicate)))
    assert found.data_parallel_size == 1
    assert (found.replicate is None) == (replicate is None)


@each_row("shards", [1, 2, 4])
def test_an_exchange_among_all_ranks(shards: int) -> None:
    """The values of all data-parallel ranks come in rank order, replica by replica, to each of them."""

    def program(world: Collectives) -> None:
        topology = rectangle(world, shards)
        assert topology.exchange(world.rank, label="ranks") == [0, 1, 2, 3]
        assert topology.group.size == (4 if shards == 1 else shards)
        assert copy.deepcopy(topology) is topology

    run_threads(4, program)
    assert Topology(SingleCollectives()).exchange("alone") == ["alone"]


def test_a_torch_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch was built without `torch.distributed`, collectives of our own are taken all the same."""
    monkeypatch.setattr(dist, "is_available", lambda: False)
    alone = SingleCollectives()
    assert resolve_topology(alone).shard is alone
    with pytest.raises(TypeError, match="expected None"):
        resolve_topology(3)  # type: ignore[arg-type]


def _parted(world: Collectives) -> str:
    topology = Topology(world)
    with pytest.raises(MismatchError) as raised:
        if world.rank == 2:
            world.exchange(("not", "labelled"), label="units")
            raise MismatchError(2, "exchange", "units", "this rank is none of a topology's")
        topology.exchange(world.rank, label="order" if world.rank == 1 else "units")
    assert topology.exchange(world.rank, label="ranks") == [0, 1, 2], "the group is usable"
    return str(raised.value)


def test_ranks_that_exchange_different_things_are_told() -> None:
    """If a rank is in another place, every rank gets an error that names the places, and not the other's value."""
    first, second, _ = run_threads(3, _parted)
    said = "rank 0 exchanges 'units'; rank 1 exchanges 'order'; rank 2 exchanges something else; make every rank"
    assert f"rank 0: exchange 'units': the ranks are in different places: {said}" in first
    assert f"rank 1: exchange 'order': the ranks are in different places: {said}" in second
