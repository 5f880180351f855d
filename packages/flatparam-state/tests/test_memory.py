"""Saving and loading take the result and one flat parameter of memory, to the byte."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from flatparam_comm import ByteLedger, Collectives, ForwardingCollectives, Pending, RecordingCollectives
from flatparam_comm.testing import run_threads
from flatparam_state import load_optimizer_state, model_state_dict, optimizer_state_dict
from flatparam_state.places import places_in

from .accounting import AllocatedBytes
from .models import Case, mlp
from .worlds import give_gradients, load, made_up_gradients, shard, shard_case


def unequal() -> nn.Sequential:
    """Four layers of which the third is by far the largest."""
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 9), nn.Linear(9, 40), nn.Linear(40, 2))


FOUR_UNITS = Case(unequal, ("0", "1", "2", "3"))


def measured(world_size: int, fn: Any, *args: Any) -> list[Any]:
    """`fn(ranks, *args)` per rank; the world copies straight from rank to rank, so that only `fn` allocates."""
    return run_threads(world_size, fn, *args, deliver_late=False)


def nbytes_of(state: Any) -> int:
    return sum(value.nbytes for value in state.values())


def full_and_own(model: nn.Module) -> list[tuple[int, int]]:
    """For each flat parameter in order: bytes of its full form with padding, and of its parameters."""
    return [
        (
            place.handle.layout.numel * place.handle.layout.dtype.itemsize,
            sum(slot.spec.nbytes for slot in place.handle.layout.slots),
        )
        for place in places_in(model)
    ]


def test_the_count_is_exact() -> None:
    """The instrument of these tests counts storages once, from when they are made to when they are dropped."""
    with AllocatedBytes() as count:
        first = torch.empty(10)
        view = first[2:].view(4, 2)
        second = torch.empty(5, dtype=torch.float64)
        assert (count.now, count.peak) == (80, 80)
        del first
        assert count.now == 80, "the view keeps the storage"
        del view
        assert (count.now, count.peak) == (40, 80)
        del second
    assert (count.now, count.peak) == (0, 80)


def test_saving_takes_the_state_and_one_flat_parameter(use_orig_params: bool) -> None:
    """Peak = what is saved up to some unit, with it, and the unit's full form; the largest sum of these."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(FOUR_UNITS, ranks, use_orig_params=use_orig_params)
        with AllocatedBytes() as count:
            state = model_state_dict(model)
        saved, peak = 0, 0
        for full, own in full_and_own(model):
            saved += own
            peak = max(peak, saved + full)
        assert count.now == nbytes_of(state) == saved
        return count.peak, peak

    for found, expected in measured(3, rank):
        assert found == expected


def test_ranks_that_keep_nothing_take_one_flat_parameter(use_orig_params: bool) -> None:
    """With `rank0_only` the other ranks' peak is the largest unit's full form, and nothing stays."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(FOUR_UNITS, ranks, use_orig_params=use_orig_params)
        with AllocatedBytes() as count:
            assert bool(model_state_dict(model, rank0_only=True)) == (ranks.rank == 0)
        return count.now if ranks.rank else 0, count.peak, max(full for full, _ in full_and_own(model))

    _, *others = measured(3, rank)
    for left, found, expected in others:
        assert (left, found) == (0, expected)


class OneAtATime(ForwardingCollectives):
    """Sees how many gathered buffers are alive whenever another one is to be filled."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.alive: list[weakref.ReferenceType[torch.UntypedStorage]] = []
        self.most = 0

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Pending:
        self.alive = [reference for reference in self.alive if reference() is not None]
        self.alive.append(weakref.ref(output.untyped_storage()))
        self.most = max(self.most, len(self.alive))
        return super().all_gather(output, shard, label=label)

    def _decorate(self, inner: Collectives) -> Collectives:
        return OneAtATime(inner)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_one_gathered_buffer_at_a_time(use_orig_params: bool, what: str) -> None:
    """A unit's full form is dropped before the next one is gathered, for parameters and for moments."""

    def rank(ranks: Collectives) -> int:
        watched = OneAtATime(ranks)
        model = shard_case(FOUR_UNITS, watched, use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(model.parameters())
        give_gradients(model, made_up_gradients(unequal(), seed=1))
        optimizer.step()
        if what == "model":
            model_state_dict(model)
        else:
            optimizer_state_dict(model, optimizer)
        return watched.most

    assert measured(2, rank) == [1, 1]


def test_saving_moves_each_flat_parameter_once(use_orig_params: bool) -> None:
    """The bytes gathered are the full parameters with their padding, and nothing else is moved."""

    def rank(ranks: Collectives) -> Any:
        ledger = ByteLedger(keep=True)
        model = shard_case(FOUR_UNITS, RecordingCollectives(ranks, ledger), use_orig_params=use_orig_params)
        model_state_dict(model)
        return [(t.op, t.payload_nbytes) for t in ledger.transfers], full_and_own(model)

    for moved, sizes in measured(3, rank):
        assert moved == [("all_gather", full) for full, _ in sizes]


def test_saving_an_optimizer_moves_each_moment_once(use_orig_params: bool) -> None:
    """Adam's two moments of each flat parameter are gathered once each; step counts travel as facts."""

    def rank(ranks: Collectives) -> Any:
        ledger = ByteLedger(keep=True)
        model = shard_case(FOUR_UNITS, RecordingCollectives(ranks, ledger), use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(model.parameters())
        give_gradients(model, made_up_gradients(unequal(), seed=1))
        optimizer.step()
        optimizer_state_dict(model, optimizer, rank0_only=True)
        return [(t.op, t.payload_nbytes) for t in ledger.transfers], full_and_own(model)

    for moved, sizes in measured(3, rank):
        assert moved == [("all_gather", full) for full, _ in sizes for _ in range(2)]


def test_saving_an_optimizer_takes_the_state_and_one_moment(use_orig_params: bool) -> None:
    """Peak beyond the state itself: one moment's full form and this rank's part of it, of the largest unit."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(FOUR_UNITS, ranks, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        give_gradients(model, made_up_gradients(unequal(), seed=1))
        optimizer.step()
        with AllocatedBytes() as count:
            optimizer_state_dict(model, optimizer)
        saved, peak = 0, 0
        for full, own in full_and_own(model):
            saved += own
            peak = max(peak, saved + full + full // ranks.size)
        return count.peak, peak

    for found, expected in measured(2, rank):
        assert found == expected


def test_loading_a_model_allocates_nothing(use_orig_params: bool) -> None:
    """A full state is copied into the shards from where it lies."""

    def rank(ranks: Collectives) -> int:
        model = shard_case(FOUR_UNITS, ranks, use_orig_params=use_orig_params)
        state = FOUR_UNITS.build(seed=8).state_dict()
        with AllocatedBytes() as count:
            load(model, state)
        return count.peak

    assert measured(3, rank) == [0, 0, 0]


def test_loading_an_optimizer_allocates_this_ranks_part() -> None:
    """Of each moment a rank makes its shard, not the full form."""

    def rank(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        give_gradients(model, made_up_gradients(mlp(), seed=1))
        optimizer.step()
        saved = optimizer_state_dict(model, optimizer)
        with AllocatedBytes() as count:
            load_optimizer_state(model, optimizer, saved)
        return count.peak, next(places_in(model)).handle.flat_param.nbytes

    for found, expected in measured(2, rank):
        assert found == expected
