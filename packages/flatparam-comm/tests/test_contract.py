"""The contract of engines, tested on every engine (see conftest.py). Each test runs on all ranks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor

from flatparam_comm import REDUCIBLE, Collectives, Pending, ReduceOp

MOVABLE = sorted(
    REDUCIBLE | {torch.bool, torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2},
    key=str,
)
REDUCTIONS = sorted(REDUCIBLE, key=str)


def _bytes(values: Tensor) -> list[int]:
    """The tensor's memory; some dtypes cannot be compared otherwise."""
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()


def _own(rank: int, numel: int, dtype: torch.dtype, device: str) -> Tensor:
    """Small whole numbers that differ from rank to rank, exact in every dtype."""
    return (torch.arange(numel, device=device) % 3 + rank).to(dtype)


def _conformity(comm: Collectives, device: str) -> int:
    assert isinstance(comm, Collectives)
    assert isinstance(comm.all_reduce(torch.zeros(1, device=device)), Pending)
    assert f"rank={comm.rank}, size={comm.size}" in repr(comm) or "Collectives(" in repr(comm)
    assert 0 <= comm.rank < comm.size
    return comm.rank


def test_ranks_are_numbered_in_order(world: Any) -> None:
    """Every engine is a `Collectives` whose rank is its place in the world, and returns `Pending`s."""
    assert world.run(_conformity) == list(range(world.size))


def _gathers(comm: Collectives, device: str) -> None:
    for dtype in MOVABLE:
        shard = _own(comm.rank, 5, dtype, device)
        output = torch.zeros(5 * comm.size, device=device).to(dtype)
        comm.all_gather(output, shard, label=str(dtype)).wait()
        expected = torch.cat([_own(rank, 5, torch.float32, device) for rank in range(comm.size)]).to(dtype)
        assert _bytes(output) == _bytes(expected), dtype
        assert _bytes(shard) == _bytes(_own(comm.rank, 5, dtype, device)), dtype


def test_all_gather_lays_the_shards_in_rank_order(world: Any) -> None:
    """all_gather puts every rank's shard, of any dtype there is, in rank order, bit for bit; the shard is unchanged."""
    world.run(_gathers)


def _gathers_in_place(comm: Collectives, device: str) -> list[float]:
    output = torch.full((2 * comm.size,), -1.0, device=device)
    mine = output[2 * comm.rank : 2 * comm.rank + 2]
    mine.fill_(comm.rank)
    comm.all_gather(output, mine).wait()
    return output.tolist()


def test_all_gather_works_in_place(world: Any) -> None:
    """The shard may be this rank's own slice of the output."""
    expected = [float(rank) for rank in range(world.size) for _ in range(2)]
    assert world.run(_gathers_in_place) == [expected] * world.size


def _reduced(comm: Collectives, values: list[Tensor], op: ReduceOp) -> Tensor:
    stacked = torch.stack(values)
    if op is ReduceOp.SUM:
        return stacked.sum(0)
    return stacked.amax(0) if op is ReduceOp.MAX else stacked.amin(0)


def _reduce_scatters(comm: Collectives, device: str) -> None:
    for dtype in REDUCTIONS:
        for op in ReduceOp:
            if dtype.is_complex and op is not ReduceOp.SUM:
                continue
            full = _own(comm.rank, 3 * comm.size, dtype, device)
            output = torch.zeros(3, dtype=dtype, device=device)
            comm.reduce_scatter(output, full, op=op).wait()
            everyone = [
                _own(rank, 3 * comm.size, dtype, device)[3 * comm.rank : 3 * comm.rank + 3] for rank in range(comm.size)
            ]
            assert torch.equal(output, _reduced(comm, everyone, op).to(dtype)), (dtype, op)
            assert torch.equal(full, _own(comm.rank, 3 * comm.size, dtype, device)), (dtype, op)


def test_reduce_scatter_leaves_each_rank_its_slice(world: Any) -> None:
    """reduce_scatter gives each rank its slice of the sum, maximum or minimum, in every dtype that can be reduced."""
    world.run(_reduce_scatters)


def _reduce_scatters_in_place(comm: Collectives, device: str) -> list[float]:
    full = torch.arange(2.0 * comm.size, device=device)
    mine = full[2 * comm.rank : 2 * comm.rank + 2]
    comm.reduce_scatter(mine, full).wait()
    return full.tolist()


def test_reduce_scatter_works_in_place(world: Any) -> None:
    """The output may be this rank's own slice of the input; the rest of the input stays as it is."""
    for rank, full in enumerate(world.run(_reduce_scatters_in_place)):
        expected = [float(index) for index in range(2 * world.size)]
        for index in (2 * rank, 2 * rank + 1):
            expected[index] *= world.size
        assert full == expected


def _all_reduces(comm: Collectives, device: str) -> None:
    for dtype in REDUCTIONS:
        for op in ReduceOp:
            if dtype.is_complex and op is not ReduceOp.SUM:
                continue
            for shape in ((), (2, 3), (1, 4, 1)):
                numel = torch.Size(shape).numel()
                tensor = _own(comm.rank, numel, dtype, device).view(shape)
                comm.all_reduce(tensor, op=op).wait()
                everyone = [_own(rank, numel, dtype, device).view(shape) for rank in range(comm.size)]
                assert torch.equal(tensor, _reduced(comm, everyone, op).to(dtype)), (dtype, op, shape)


def test_all_reduce_replaces_the_tensor(world: Any) -> None:
    """all_reduce puts the reduction of all ranks in place of a tensor of any shape, in every reducible dtype."""
    world.run(_all_reduces)


def _deals(comm: Collectives, device: str) -> None:
    def numel(giver: int, taker: int) -> int:
        # Some ranks give others nothing.
        return (2 * giver + 3 * taker) % 4

    ranks = range(comm.size)
    for dtype in MOVABLE:
        output_numels = [numel(giver, comm.rank) for giver in ranks]
        given_numels = [numel(comm.rank, taker) for taker in ranks]
        given = _own(comm.rank, sum(given_numels), dtype, device)
        output = torch.zeros(sum(output_numels), device=device).to(dtype)
        comm.all_to_all(output, given, output_numels=output_numels, given_numels=given_numels, label=str(dtype)).wait()
        expected = []
        for giver in ranks:
            all_given = _own(giver, sum(numel(giver, taker) for taker in ranks), torch.float32, device)
            start = sum(numel(giver, taker) for taker in range(comm.rank))
            expected.append(all_given[start : start + numel(giver, comm.rank)])
        assert _bytes(output) == _bytes(torch.cat(expected).to(dtype)), dtype
        assert _bytes(given) == _bytes(_own(comm.rank, sum(given_numels), dtype, device)), dtype


def test_all_to_all_deals_out_parts_of_any_length(world: Any) -> None:
    """all_to_all gives each rank its part of every rank's tensor, in rank order, of any length and dtype, bit for bit."""
    world.run(_deals)


def _broadcasts(comm: Collectives, device: str) -> None:
    for root in range(comm.size):
        for dtype in MOVABLE:
            tensor = _own(comm.rank, 6, dtype, device).view(2, 3)
            comm.broadcast(tensor, root=root).wait()
            assert _bytes(tensor) == _bytes(_own(root, 6, dtype, device)), (dtype, root)


def test_broadcast_copies_the_root(world: Any) -> None:
    """broadcast puts the root's values, of any dtype there is, in place of everyone's, whichever rank is the root."""
    world.run(_broadcasts)


def _exchanges(comm: Collectives, device: str) -> list[Any]:
    mine = {"rank": comm.rank, "list": [comm.rank] * comm.rank}
    everyone = comm.exchange(mine, label="facts")
    everyone[comm.rank]["rank"] = "changed"
    assert mine["rank"] == comm.rank
    comm.barrier(label="end")
    return comm.exchange(comm.rank * 10)


def test_exchange_gives_copies_in_rank_order(world: Any) -> None:
    """exchange gives every rank a copy of every rank's value, in rank order."""
    assert world.run(_exchanges) == [[rank * 10 for rank in range(world.size)]] * world.size


def _subgroups(comm: Collectives, device: str) -> Any:
    last = comm.size - 1
    ends = comm.subgroup([0, last] if last else [0])
    alone = comm.subgroup([last])
    assert (alone is None) == (comm.rank != last)
    if ends is None:
        return None
    value = torch.tensor([float(comm.rank)], device=device)
    ends.broadcast(value, root=ends.size - 1).wait()
    everyone = ends.exchange(comm.rank)
    inner = ends.subgroup([ends.size - 1])
    assert (inner is None) == (ends.rank != ends.size - 1)
    return ends.rank, ends.size, value.item(), everyone


def test_subgroups_have_ranks_of_their_own(world: Any) -> None:
    """subgroup gives members a group numbered from 0, whose root is a rank of it, and None to others; groups nest."""
    last = world.size - 1
    members = [0, last] if last else [0]
    expected = [
        (members.index(rank), len(members), float(last), members) if rank in members else None
        for rank in range(world.size)
    ]
    assert world.run(_subgroups) == expected


def _out_of_order(comm: Collectives, device: str) -> list[list[float]]:
    outputs = [torch.zeros(comm.size, device=device) for _ in range(4)]
    pendings = [
        comm.all_gather(output, torch.tensor([10.0 * index + comm.rank], device=device))
        for index, output in enumerate(outputs)
    ]
    for pending in reversed(pendings):
        pending.wait()
        assert pending.done()
        pending.wait()
    return [output.tolist() for output in outputs]


def test_pendings_may_be_waited_for_in_any_order(world: Any) -> None:
    """Several collectives may be under way; their pendings may be waited for in any order, and more than once."""
    expected = [[10.0 * index + rank for rank in range(world.size)] for index in range(4)]
    assert world.run(_out_of_order) == [expected] * world.size


def _drops_arguments(comm: Collectives, device: str) -> list[float]:
    output = torch.zeros(1000 * comm.size, device=device)
    pending = comm.all_gather(output, torch.full((1000,), float(comm.rank), device=device))
    gc.collect()
    noise = [torch.full((1000,), -1.0, device=device) for _ in range(50)]
    pending.wait()
    del noise
    return output[::1000].tolist()


def test_pendings_keep_the_tensors(world: Any) -> None:
    """The caller may drop the input at once: the pending keeps it until it is waited for."""
    assert world.run(_drops_arguments) == [[float(rank) for rank in range(world.size)]] * world.size


def _lets_go(comm: Collectives, device: str) -> None:
    pendings, references = [], []
    for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        full = torch.zeros(4 * comm.size, device=device)
        part = torch.zeros(4, device=device)
        if op == "all_gather":
            pendings.append(comm.all_gather(full, part))
        elif op == "reduce_scatter":
            pendings.append(comm.reduce_scatter(part, full))
        elif op == "all_reduce":
            pendings.append(comm.all_reduce(full))
        else:
            pendings.append(comm.broadcast(full))
        references += [weakref.ref(full), weakref.ref(part)]
    for pending in pendings:
        pending.wait()
    del full, part
    comm.barrier()
    gc.collect()
    assert all(reference() is None for reference in references)


def test_pendings_let_go_once_waited_for(world: Any) -> None:
    """A pending that has been waited for keeps no tensor alive, even if somebody keeps the pending."""
    world.run(_lets_go)


def _reuses_input(comm: Collectives, device: str) -> list[float]:
    shard = torch.full((2,), float(comm.rank), device=device)
    first, second = torch.zeros(2 * comm.size, device=device), torch.zeros(2 * comm.size, device=device)
    comm.all_gather(first, shard).wait()
    shard.fill_(100.0)
    comm.all_gather(second, shard).wait()
    return [*first[::2].tolist(), *second[::2].tolist()]


def test_inputs_may_be_reused_after_the_wait(world: Any) -> None:
    """Once a rank has waited, what it writes to its input reaches no other rank's output."""
    expected = [float(rank) for rank in range(world.size)] + [100.0] * world.size
    assert world.run(_reuses_input) == [expected] * world.size


def _empty(comm: Collectives, device: str) -> None:
    comm.all_gather(torch.zeros(0, device=device), torch.zeros(0, device=device)).wait()
    comm.reduce_scatter(torch.zeros(0, device=device), torch.zeros(0, device=device)).wait()
    comm.all_reduce(torch.zeros(0, 3, device=device)).wait()
    comm.broadcast(torch.zeros(0, device=device)).wait()


def test_empty_tensors_are_fine(world: Any) -> None:
    """A rank whose shard is empty calls the same collectives as any other."""
    world.run(_empty)


def _parameters(comm: Collectives, device: str) -> None:
    parameter = torch.nn.Parameter(torch.full((2,), float(comm.rank), device=device))
    output = torch.zeros(2 * comm.size, device=device)
    comm.all_gather(output, parameter).wait()
    comm.broadcast(parameter).wait()
    comm.all_reduce(parameter).wait()
    assert output.grad_fn is None
    assert not output.requires_grad
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.tolist() == [0.0, 0.0]


def test_parameters_can_be_moved(world: Any) -> None:
    """Tensors that require gradients are moved like others, and autograd does not see it."""
    world.run(_parameters)


def _agreement(comm: Collectives, device: str) -> None:
    full = torch.randn(6 * comm.size, device=device, generator=torch.Generator(device).manual_seed(comm.rank))
    reduced = full.clone()
    comm.all_reduce(reduced).wait()
    shard, gathered = torch.zeros(6, device=device), torch.zeros_like(full)
    comm.reduce_scatter(shard, full).wait()
    comm.all_gather(gathered, shard).wait()
    everyone = comm.exchange(gathered.tolist())
    assert all(each == everyone[0] for each in everyone)
    assert torch.allclose(gathered, reduced)
    # A sum of two has one order.
    if comm.size <= 2:
        assert torch.equal(gathered, reduced)


def test_gather_of_scattered_sums_is_the_all_reduce(world: Any) -> None:
    """reduce_scatter then all_gather gives all ranks the same bits: those of all_reduce if the order cannot matter."""
    world.run(_agreement)
