"""The transfer of flat parameters, with nothing above: a gather into their buffers and a reduction out of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import (
    CollectiveError,
    Collectives,
    Fault,
    FaultyCollectives,
    FlatParamHandle,
    ForwardingCollectives,
    Gather,
    NoStreams,
    Pending,
    Raise,
    Reduced,
    Reducer,
    Residency,
    SingleCollectives,
    Topology,
    streams_of,
)
from flatparam_comm.testing import rectangle, run_threads
from flatparam_core import Precision, flatten_module

WIDTH = 5


def layers() -> nn.Module:
    """Two layers in two dtypes, so that they are two flat parameters."""
    torch.manual_seed(7)
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)])


def flattened(
    group: Collectives, precision: Precision | None = None, *, original: bool = False
) -> tuple[nn.Module, tuple[FlatParamHandle, ...]]:
    module = layers()
    handles = flatten_module(
        module, rank=group.rank, world_size=group.size, use_orig_params=original, precision=precision
    )
    return module, handles


def shown(module: nn.Module) -> list[Tensor]:
    """Copies of what the module shows at the moment under its parameters' names."""
    return [getattr(layer, name).detach().clone() for layer in module for name in ("weight", "bias")]


def whole() -> list[Tensor]:
    return [parameter.detach() for parameter in layers().parameters()]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@each_row("ranks", [1, 2, 3])
@each_row("original", [False, True], ids=["flat", "originals"])
def test_a_gather_shows_the_full_parameters(ranks: int, original: bool) -> None:
    """Once it is finished the module shows the full parameters; dropped, before or after, nothing is in memory."""

    def program(group: Collectives) -> None:
        module, handles = flattened(group, original=original)
        gather = Gather.issue(handles, group, label="layers")
        gather.finish()
        assert same(shown(module), whole())
        assert gather.stamp == sum(handle.stamp() for handle in handles)
        gather.drop()
        assert {handle.residency for handle in handles} == {Residency.SHARDED}
        Gather.issue(handles, group).drop()
        assert all(handle.buffer.held_nbytes == 0 for handle in handles)

    run_threads(ranks, program)


def test_a_gather_in_the_parameters_own_dtype() -> None:
    """`full_precision` gathers what is stored; without it parameters have the dtype that they compute in."""

    def program(group: Collectives) -> None:
        module, handles = flattened(group, Precision(param_dtype=torch.bfloat16))
        for full_precision in (True, False):
            gather = Gather.issue(handles, group, full_precision=full_precision, copied=True)
            gather.finish()
            expected = whole() if full_precision else [each.bfloat16() for each in whole()]
            assert same(shown(module), expected)
            gather.drop()

    run_threads(2, program)


def test_a_hook_in_place_of_the_gather() -> None:
    """The hook is given each shard and the memory of the full parameter, and nothing else communicates."""

    def program(group: Collectives) -> None:
        module, handles = flattened(group)
        broken = FaultyCollectives(group, [Fault("all_gather", action=Raise(RuntimeError("unused")))])

        def hook(shard: Tensor, full: Tensor) -> None:
            group.all_gather(full, shard).wait()

        Gather.issue(handles, broken, hook=hook).finish()
        assert same(shown(module), whole())

    run_threads(2, program)


@each_row("nth", [0, 1])
def test_a_gather_that_cannot_be_issued(nth: int) -> None:
    """What was issued before is waited for, everything is freed, and the next gather works."""
    error = CollectiveError(0, "all_gather", "layers", "on purpose")
    single = SingleCollectives()
    module, handles = flattened(single)
    fails = FaultyCollectives(single, [Fault("all_gather", nth=nth, action=Raise(error))])
    with pytest.raises(CollectiveError, match="on purpose"):
        Gather.issue(handles, fails, label="layers")
    assert {handle.residency for handle in handles} == {Residency.SHARDED}
    Gather.issue(handles, fails, label="layers").finish()
    assert same(shown(module), whole())


class Failing(ForwardingCollectives):
    """Gathers that come to nothing, each with an error of its own."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.waited: list[int] = []

    def _decorate(self, inner: Collectives) -> Failing:
        return Failing(inner)

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        pending = self.inner.all_gather(output, shard, label=label)
        return FailingPending(pending, self.waited)


@attrs.frozen
class FailingPending:
    """A gather that fails when it is waited for."""

    inner: Pending
    waited: list[int]

    def wait(self) -> None:
        self.inner.wait()
        self.waited.append(len(self.waited))
        raise CollectiveError(0, "all_gather", "layers", f"number {self.waited[-1]}")


def test_a_gather_waits_for_all_of_its_collectives() -> None:
    """If one fails, the others are waited for before the memory goes that they write to; the first error is raised."""
    fails = Failing(SingleCollectives())
    _, handles = flattened(fails)
    gather = Gather.issue(handles, fails, label="layers", copied=True)
    with pytest.raises(CollectiveError, match="number 0"):
        gather.finish()
    assert fails.waited == [0, 1]


def deposit(handles: Sequence[FlatParamHandle], reducer: Reducer, rank: int, *, but: int | None = None) -> None:
    """Collect a gradient of `rank + 1` times the index of each parameter plus one."""
    before = reducer.averaging(handles).before
    for handle in handles:
        for index, leaf in enumerate(handle.leaves):
            if index != but:
                leaf.grad = torch.full_like(leaf, (rank + 1.0) * (index + 1))
                handle.deposit(index, divisor=before)


def gathered(group: Collectives, settled: Sequence[Reduced]) -> list[list[float]]:
    """For each flat parameter the full gradient's value of each parameter, which is the same for all its elements."""
    found = []
    for reduced in settled:
        layout = reduced.handle.layout
        full = torch.cat(group.exchange(reduced.gradient.detach().clone()))
        values = [full[slot.span.as_slice()].unique().tolist() for slot in layout.slots]
        assert all(len(each) == 1 for each in values)
        found.append([value for (value,) in values])
    return found


def number_of(topology: Topology) -> int:
    """The number of this rank among all: replica by replica."""
    copies = topology.replicate
    return topology.shard.rank + topology.shard.size * (0 if copies is None else copies.rank)


def reduced(
    topology: Topology,
    change: Callable[[Reducer], None] = lambda reducer: None,
    precision: Precision | None = None,
) -> list[list[float]]:
    """The gradients of both parameters of each flat parameter after one reduction over `topology`."""
    _, handles = flattened(topology.shard, precision)
    reducer = Reducer(topology)
    change(reducer)
    gather = Gather.issue(handles, topology.shard)
    gather.finish()
    deposit(handles, reducer, number_of(topology))
    reduction = reducer.issue(handles, label="layers")
    assert reduction.replicate() == sum(handle.gradients.buffer.nbytes for handle in handles)
    assert all(handle.gradients.buffer.held_nbytes == 0 for handle in handles)
    settled = reduction.settle()
    assert all(all(each.arrived) for each in settled)
    gather.drop()
    return gathered(topology.shard, settled)


MEAN = [[2.5, 5.0], [2.5, 5.0]]
"""The mean of 1, 2, 3 and 4, once and twice."""


@each_row("shards", [1, 2, 4])
@each_row("dtype", [None, torch.bfloat16, torch.float16])
def test_a_reduction_is_a_mean_over_all_ranks(shards: int, dtype: torch.dtype | None) -> None:
    """Over shards, over copies, and over both, in any dtype: four ranks get the mean of their four gradients."""
    precision = None if dtype is None else Precision(reduce_dtype=dtype)
    assert run_threads(4, lambda world: reduced(rectangle(world, shards), precision=precision)) == [MEAN] * 4


@each_row("size", [1, 3])
def test_a_reduction_without_copies(size: int) -> None:
    """Without a group of copies, too: the mean of 1, 2, ... over the ranks that share the parameters."""
    mean = (size + 1) / 2
    assert run_threads(size, lambda world: reduced(Topology(world))) == [[[mean, 2 * mean]] * 2] * size


@each_row("factor", [1.0, 5.0])
def test_a_divisor_of_the_users(factor: float) -> None:
    """`divide_factor` takes the place of the number of ranks."""

    def change(reducer: Reducer) -> None:
        reducer.divide_factor = factor

    expected = [[10.0 / factor, 20.0 / factor]] * 2
    assert run_threads(4, lambda world: reduced(rectangle(world, 2), change)) == [expected] * 4


@each_row("shards", [1, 2, 4])
def test_a_divisor_of_the_users_beside_a_hook(shards: int) -> None:
    """A hook averages over the copies, and the sum is divided by `divide_factor` altogether."""

    def program(world: Collectives) -> list[list[float]]:
        topology = rectangle(world, shards)
        copies = topology.replicate
        assert copies is not None

        def all_reduce(state: None, shard: Tensor) -> None:
            copies.all_reduce(shard).wait()
            shard.div_(copies.size)

        def change(reducer: Reducer) -> None:
            reducer.divide_factor = 5.0
            reducer.hooks.set("all_reduce", None, all_reduce, in_place=True)

        return reduced(topology, change)

    assert run_threads(4, program) == [[[2.0, 4.0]] * 2] * 4


@each_row("shards", [1, 2, 4])
def test_hooks_average_over_their_own_ranks(shards: int) -> None:
    """A hook in place of a sum averages over the ranks of that sum; what is left is divided after it."""

    def program(world: Collectives) -> list[list[list[float]]]:
        topology = rectangle(world, shards)
        copies = topology.replicate
        assert copies is not None

        def reduce(state: str, full: Tensor, shard: Tensor) -> None:
            # If nothing is sharded, the hook has to sum over the copies.
            if topology.shard.size == 1:
                copies.all_reduce(shard).wait()
                shard.div_(copies.size)
                return
            topology.shard.reduce_scatter(shard, full).wait()
            shard.div_(topology.shard.size)

        def all_reduce(state: str, shard: Tensor) -> None:
            copies.all_reduce(shard).wait()
            shard.div_(copies.size)

        def first(reducer: Reducer) -> None:
            reducer.hooks.set("reduce", "state", reduce, in_place=False)

        def second(reducer: Reducer) -> None:
            reducer.hooks.set("all_reduce", "state", all_reduce, in_place=True)

        def both(reducer: Reducer) -> None:
            first(reducer)
            second(reducer)

        every = (first, second, both) if shards > 1 else (first, second)
        return [reduced(topology, change) for change in every]

    for found in run_threads(4, program):
        assert all(each == MEAN for each in found)


def test_shards_that_wait_for_their_copies() -> None:
    """Without `sums_copies` a reduced shard waits, and comes with the next reduction, unless it is forgotten."""

    def program(world: Collectives) -> list[list[list[float]]]:
        topology = rectangle(world, 2)
        _, handles = flattened(topology.shard)
        reducer = Reducer(topology)
        found = []
        for sums_copies, forgets in [
            (False, False),
            (False, False),
            (True, False),
            (False, True),
            (True, False),
        ]:
            reducer.sums_copies = sums_copies
            gather = Gather.issue(handles, topology.shard)
            gather.finish()
            deposit(handles, reducer, number_of(topology))
            reduction = reducer.issue(handles)
            reduction.replicate()
            settled = reduction.settle()
            gather.drop()
            assert bool(settled) == sums_copies
            if settled:
                found.append(gathered(topology.shard, settled))
            if forgets:
                reducer.forget()
        return found

    expected = [[[7.5, 15.0]] * 2, MEAN]
    assert run_threads(4, program) == [expected] * 4


def test_parameters_whose_waiting_gradients_are_dropped() -> None:
    """What waits of a chosen parameter is dropped, unsharded or before the sum over copies, and the rest stays."""

    def program(world: Collectives) -> list[list[int]]:
        topology = rectangle(world, 2)
        _, handles = flattened(topology.shard)
        reducer = Reducer(topology)
        found = []
        for sums_copies, dropped in [(False, 0), (True, 1)]:
            reducer.sums_copies = sums_copies
            gather = Gather.issue(handles, topology.shard)
            gather.finish()
            deposit(handles, reducer, number_of(topology))
            for handle in handles if dropped else ():
                reducer.drop(handle, [dropped])
            reduction = reducer.issue(handles)
            reduction.replicate()
            found += [list(map(int, each.arrived)) for each in reduction.settle()]
            assert reducer.waits != sums_copies
            for handle in handles if reducer.waits else ():
                reducer.drop(handle, [0])
                reducer.drop(handle, [0, 1])
            gather.drop()
        return found

    assert run_threads(4, program) == [[[1, 0]] * 2] * 4


def test_who_had_a_gradient() -> None:
    """`arrived` says of which parameters this rank had a gradient, of all passes since the copies were summed."""

    def program(world: Collectives) -> list[list[int]]:
        topology = rectangle(world, 2)
        _, handles = flattened(topology.shard)
        reducer = Reducer(topology)
        arrived = []
        for sums_copies, missing in [(True, 0), (True, 1), (False, 0), (True, 1)]:
            reducer.sums_copies = sums_copies
            gather = Gather.issue(handles, topology.shard)
            gather.finish()
            deposit(handles, reducer, world.rank, but=missing)
            reduction = reducer.issue(handles)
            reduction.replicate()
            arrived += [list(map(int, each.arrived)) for each in reduction.settle()]
            gather.drop()
        return arrived

    assert run_threads(4, program) == [[[0, 1], [0, 1], [1, 0], [1, 0], [1, 1], [1, 1]]] * 4


def test_a_copy_of_a_reducer() -> None:
    """It has the same settings and functions, and none of the gradients that wait."""
    reducer = Reducer(Topology(SingleCollectives()), divide_factor=3.0, sums_copies=False)
    reducer.hooks.set("reduce", None, lambda state, full, shard: None, in_place=False)
    copied = reducer.copy()
    assert (copied.divide_factor, copied.sums_copies) == (3.0, False)
    assert copied.hooks.reduce is reducer.hooks.reduce
    copied.hooks.set("reduce", None, None, in_place=False)
    assert reducer.hooks.reduce is not None


def test_a_reduction_that_is_dropped() -> None:
    """The sums under way are waited for, even if one of them fails, and the next reduction is as if there was none."""

    def program(group: Collectives) -> None:
        _, handles = flattened(group)
        reducer = Reducer(Topology(group))
        Gather.issue(handles, group).finish()
        deposit(handles, reducer, 7)
        reducer.issue(handles).drop()
        for handle in handles:
            handle.drop_gradients()
            handle.reshard()
        Gather.issue(handles, group).finish()
        deposit(handles, reducer, group.rank)
        reduction = reducer.issue(handles)
        reduction.replicate()
        assert gathered(group, reduction.settle()) == [[1.5, 3.0]] * 2

    run_threads(2, program)


def test_hooks_are_checked() -> None:
    """A stage has one hook, its name is one of three, and the hook can be called."""
    hooks = Reducer(Topology(SingleCollectives())).hooks
    hooks.check_free("reduce", "blocks.0")
    hooks.set("reduce", None, lambda state, full, shard: None, in_place=False)
    with pytest.raises(AssertionError, match=r"unit 'blocks\.0' already has a communication hook .*'reduce'"):
        hooks.check_free("reduce", "blocks.0")
    with pytest.raises(ValueError, match="expected the stage"):
        hooks.set("sum", None, print, in_place=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a communication hook that can be called, found int"):
        hooks.set("all_reduce", None, 3, in_place=False)  # type: ignore[arg-type]


def test_a_hook_that_replaces_the_memory_of_its_argument() -> None:
    """What a hook in place leaves in its argument counts, even if it has given the argument other memory."""

    def replace(state: str, shard: Tensor) -> None:
        shard.set_(torch.full_like(shard, 9.0))

    def change(reducer: Reducer) -> None:
        reducer.hooks.set("all_reduce", "state", replace, in_place=True)

    assert run_threads(2, lambda world: reduced(rectangle(world, 1), change)) == [[[9.0, 9.0]] * 2] * 2


def run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("flatparam_") and getattr(module, "streams_of", None) is streams_of:
            monkeypatch.setattr(module, "streams_of", lambda device: NoStreams(runs_ahead=True))


def test_memory_that_was_taken_for_copies_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a gather cannot be issued, the memory of the flat parameters that come after it is free, too."""
    run_ahead(monkeypatch)
    single = SingleCollectives()
    _, handles = flattened(single)
    fails = FaultyCollectives(single, [Fault("all_gather", action=Raise(CollectiveError(0, "all_gather", "", "no")))])
    with pytest.raises(CollectiveError, match="no"):
        Gather.issue(handles, fails, copied=True)
    assert all(handle.buffer.held_nbytes == 0 for handle in handles)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_host_that_runs_ahead(monkeypatch: pytest.MonkeyPatch, offloaded: bool) -> None:
    """Where the host runs ahead, copies have streams of their own; here the CPU says that it is such a device."""
    run_ahead(monkeypatch)

    def program(group: Collectives) -> None:
        module = layers()
        storage = torch.device("cpu") if offloaded else None
        handles = flatten_module(
            module, rank=group.rank, world_size=group.size, use_orig_params=False, storage_device=storage
        )
        gather = Gather.issue(handles, group)
        gather.finish()
        assert same(shown(module), whole())
        reducer = Reducer(Topology(group))
        deposit(handles, reducer, group.rank)
        reduction = reducer.issue(handles)
        reduction.replicate()
        settled = reduction.settle()
        for each in settled:
            each.let_go()
        assert gathered(group, settled) == [[1.5, 3.0]] * 2
        gather.drop()

    run_threads(2, program)


@attrs.define
class _Moving:
    """A collective of a backend that moves bytes while nobody waits; the first wait is interrupted."""

    inner: Pending
    waits: list[str]
    moves_by_itself: bool = True

    def wait(self) -> None:
        self.waits.append("waits")
        if len(self.waits) == 1:
            raise KeyboardInterrupt
        self.inner.wait()

    def done(self) -> bool:
        return False


class _Interrupted(ForwardingCollectives):
    """A group whose collectives are `_Moving`, or are waited for to move anything."""

    def __init__(self, inner: Collectives, moves_by_itself: bool) -> None:
        super().__init__(inner)
        self.waits: list[str] = []
        self.moves_by_itself = moves_by_itself

    def _decorate(self, inner: Collectives) -> Collectives:
        return _Interrupted(inner, self.moves_by_itself)

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        return _Moving(self.inner.all_gather(output, shard, label=label), self.waits, self.moves_by_itself)

    def reduce_scatter(self, output: Tensor, full: Tensor, **options: Any) -> Pending:
        return _Moving(self.inner.reduce_scatter(output, full, **options), self.waits, self.moves_by_itself)


@pytest.mark.parametrize("moves_by_itself", [False, True])
@pytest.mark.parametrize("what", ["gather", "reduction"])
def test_an_interrupt_in_a_wait(what: str, moves_by_itself: bool) -> None:
    """What a backend reads or writes by itself is waited for before the interrupt goes on; nothing else is, again."""
    group = _Interrupted(SingleCollectives(), moves_by_itself)
    _, handles = flattened(SingleCollectives())
    if what == "gather":
        gather = Gather.issue(handles, group)
        with pytest.raises(KeyboardInterrupt):
            gather.finish()
    else:
        reducer = Reducer(Topology(group))
        reduction = reducer.issue(handles, averaging=reducer.averaging(handles))
        with pytest.raises(KeyboardInterrupt):
            reduction.replicate()
    assert group.waits == ["waits"] * (1 + len(handles) * moves_by_itself)
