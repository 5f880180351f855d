"""Every rank makes the same calls: what differs is told to all, and so is what interrupts one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_checkpoint import Checkpointer
from flatparam_comm import Collectives, Topology
from flatparam_comm.testing import run_threads
from flatparam_files import CheckpointError, Moment, verify_checkpoint
from flatparam_runtime import UnitPlan, shard_module
from flatparam_state import ShardedEMA, model_state_dict

from .beneath import Setup, assert_equal_state, full_state

SETUP = Setup(2)

# Arguments that differ

CALLS: dict[str, tuple[list[Callable[[Checkpointer], object]], str]] = {
    "load: step": (
        [lambda c: c.load(1), lambda c: c.load(2), lambda c: c.load(1)],
        "step is 1 on ranks 0, 2, 2 on rank 1",
    ),
    "load: a step or the latest": (
        [lambda c: c.load(), lambda c: c.load(2), lambda c: c.load(2)],
        "step is None on rank 0, 2 on ranks 1-2",
    ),
    "load: one that is not there": (
        [lambda c: c.load(9), lambda c: c.load(1), lambda c: c.load(1)],
        "step is 9 on rank 0, 1 on ranks 1-2",
    ),
    "load: strict": (
        [lambda c: c.load(), lambda c: c.load(), lambda c: c.load(strict=False)],
        "strict is True on ranks 0-1, False on rank 2",
    ),
    "load: convert_dtype": (
        [lambda c: c.load(), lambda c: c.load(convert_dtype=True), lambda c: c.load()],
        "convert_dtype is False on ranks 0, 2, True on rank 1",
    ),
    "load: other_states": (
        [lambda c: c.load(other_states=True), lambda c: c.load(), lambda c: c.load()],
        "other_states is True on rank 0, False on ranks 1-2",
    ),
    "save or load": (
        [lambda c: c.load(), lambda c: c.save(3), lambda c: c.load()],
        "call is 'load' on ranks 0, 2, 'save' on rank 1",
    ),
    "load: several": (
        [lambda c: c.load(1), lambda c: c.load(1), lambda c: c.load(2, strict=False)],
        "step is 1 on ranks 0-1, 2 on rank 2; strict is True on ranks 0-1, False on rank 2",
    ),
    "save: step": (
        [lambda c: c.save(3), lambda c: c.save(3), lambda c: c.save(4)],
        "step is 3 on ranks 0-1, 4 on rank 2",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_arguments_that_differ(what: str, tmp_path: Path) -> None:
    """Every rank raises one error that says what each rank asks for; model, optimizer and directory stay as they are."""
    calls, expected = CALLS[what]

    def run(world: Collectives) -> str:
        model, optimizer = SETUP.build(world)
        with Checkpointer(tmp_path, model, optimizer, ranks=world) as checkpointer:
            for step in (1, 2):
                SETUP.train(model, optimizer, range(step - 1, step))
                checkpointer.save(step)
            before = full_state(model, optimizer)
            with pytest.raises(CheckpointError) as caught:
                calls[world.rank](checkpointer)
            assert_equal_state(full_state(model, optimizer), before)
            assert checkpointer.steps() == [1, 2]
            loaded = checkpointer.load(1)
            assert loaded is not None
            assert loaded.step == 1
        return str(caught.value)

    said = run_threads(3, run)
    assert len(set(said)) == 1
    assert f"the ranks ask for different things: {expected}; have every rank make" in said[0]


OPTIONS: dict[str, tuple[Callable[[int, nn.Module, torch.optim.Optimizer], dict[str, Any]], str]] = {
    "optimizer": (
        lambda rank, model, optimizer: {"optimizer": optimizer if rank else None},
        "optimizer is [] on rank 0, ['optimizer'] on rank 1",
    ),
    "names of optimizers": (
        lambda rank, model, optimizer: {"optimizer": {"ab"[rank]: optimizer}},
        "optimizer is ['optimizer/a'] on rank 0, ['optimizer/b'] on rank 1",
    ),
    "averages": (
        lambda rank, model, optimizer: {"averages": ShardedEMA(model, decay=0.5) if rank else None},
        "averages is [] on rank 0, ['averages'] on rank 1",
    ),
    "asynchronous": (
        lambda rank, model, optimizer: {"asynchronous": rank == 1},
        "asynchronous is False on rank 0, True on rank 1",
    ),
    "keep": (lambda rank, model, optimizer: {"keep": 1 + rank}, "keep is 1 on rank 0, 2 on rank 1"),
    "on_save_error": (
        lambda rank, model, optimizer: {"on_save_error": ["raise", "warn"][rank]},
        "on_save_error is 'raise' on rank 0, 'warn' on rank 1",
    ),
}


@each_row("what", OPTIONS)
def test_checkpointers_that_differ(what: str, tmp_path: Path) -> None:
    """The same for what ranks gave to their `Checkpointer`: `save` and `load` say it, and nothing is written."""
    options, expected = OPTIONS[what]

    def run(world: Collectives) -> list[str]:
        model, optimizer = SETUP.build(world)
        checkpointer = Checkpointer(tmp_path, model, ranks=world, **options(world.rank, model, optimizer))
        said = []
        for call in (lambda: checkpointer.save(1), checkpointer.load):
            with pytest.raises(CheckpointError) as caught:
                call()
            said.append(str(caught.value))
        return said

    first, second = run_threads(2, run)
    assert first == second
    assert all(f"the ranks ask for different things: {expected}; have" in each for each in first)
    assert not [*tmp_path.iterdir()]


def test_a_rank_that_asks_for_what_there_cannot_be(tmp_path: Path) -> None:
    """A wrong step on one rank: it raises `ValueError`, and the others are told what it says."""

    def run(world: Collectives) -> str:
        checkpointer = Checkpointer(tmp_path, ranks=world)
        with pytest.raises(ValueError if world.rank else CheckpointError) as caught:
            checkpointer.save(-1 if world.rank else 1)
        return str(caught.value)

    first, second = run_threads(2, run)
    assert second in first
    assert first.startswith("rank 1: ValueError: expected a step of at least 0")


def test_a_rank_that_shows_its_averages(tmp_path: Path) -> None:
    """One rank saves, or loads, inside of `applied()`: all are told, and nobody waits."""

    def run(world: Collectives) -> None:
        model, _ = SETUP.build(world)
        averages = ShardedEMA(model, decay=0.5)
        averages.update()
        checkpointer = Checkpointer(tmp_path, model, averages=averages, ranks=world)
        checkpointer.save(1)
        with pytest.raises(CheckpointError, match="rank 1: the model shows its averages"):
            if world.rank:
                with averages.applied(model):
                    checkpointer.save(2)
            else:
                checkpointer.save(2)
        checkpointer.close()

    run_threads(2, run)


# Interrupts


class InterruptAt:
    """Raises something that is no `Exception`, at a moment, once."""

    def __init__(self, moment: Moment, error: type[BaseException]) -> None:
        self.moment, self.error, self.armed = moment, error, False

    def __call__(self, moment: Moment) -> None:
        if self.armed and moment is self.moment:
            self.armed = False
            raise self.error("stop")


@each_row("asynchronous", [False, True])
@each_row("rank", [0, 1])
@each_row("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@each_row("moment", [Moment.LOCKED, Moment.PIECE_WRITTEN, Moment.REPORTED, Moment.MANIFEST_WRITTEN])
def test_an_interrupt_while_saving(
    moment: Moment, error: type[BaseException], rank: int, asynchronous: bool, tmp_path: Path
) -> None:
    """The rank raises what has interrupted it, the others are told at once, nothing is left, and the next save works."""
    if rank and moment in (Moment.LOCKED, Moment.MANIFEST_WRITTEN):
        return

    def run(world: Collectives) -> None:
        model, optimizer = SETUP.build(world)
        interrupt = InterruptAt(moment, error)
        checkpointer = Checkpointer(
            tmp_path, model, optimizer, ranks=world, asynchronous=asynchronous, on_moment=interrupt
        )
        checkpointer.save(1)
        checkpointer.wait()
        interrupt.armed = world.rank == rank
        with pytest.raises(error if world.rank == rank else CheckpointError) as caught:
            checkpointer.save(2)
            checkpointer.wait()
        if world.rank != rank:
            assert str(caught.value) == f"rank {rank}: {error.__name__}: stop"
        world.barrier()
        assert checkpointer.steps() in ([1], [1, 2] if may_be_whole else [1])
        world.barrier()
        checkpointer.save(3)
        checkpointer.close()

    # Rank 1 has done its part by then; rank 0 may have made the checkpoint before it hears of the interrupt.
    may_be_whole = asynchronous and rank == 1 and moment is Moment.REPORTED
    run_threads(2, run)
    found = sorted(path.name for path in tmp_path.iterdir())
    if may_be_whole and "step-00000002" in found:
        found.remove("step-00000002")
    assert found == ["latest", "lock", "step-00000001", "step-00000003"]
    assert verify_checkpoint(tmp_path).is_sound


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupt_while_loading(
    error: type[BaseException], rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same while a rank reads: no rank has changed anything, and loading again works."""
    module = "flatparam_checkpoint.load.load_session.prepare"
    from flatparam_checkpoint.load.load_session import prepare

    armed = [True]

    def interrupted(reader: Any, world: Any, *rest: Any) -> Any:
        if world.rank == rank and armed:
            armed.pop()
            raise error("stop")
        return prepare(reader, world, *rest)

    monkeypatch.setattr(module, interrupted)
    is_own = not issubclass(error, Exception)

    def run(world: Collectives) -> None:
        model, optimizer = SETUP.build(world)
        with Checkpointer(tmp_path, model, optimizer, ranks=world) as checkpointer:
            checkpointer.save(1)
            SETUP.train(model, optimizer, range(1))
            before = full_state(model, optimizer)
            with pytest.raises(error if is_own and world.rank == rank else CheckpointError) as caught:
                checkpointer.load()
            if not is_own or world.rank != rank:
                assert str(caught.value) == f"rank {rank}: {error.__name__}: stop"
            assert_equal_state(full_state(model, optimizer), before)
            assert checkpointer.load() is not None

    run_threads(2, run)


# The ranks of the model


def shard(model: nn.Module, topology: Topology) -> nn.Module:
    plan = UnitPlan(topology, free_after_forward=True, free_after_unsynced_backward=True, use_orig_params=False)
    shard_module(model, plan)
    return model


def halves(world: Collectives) -> Collectives:
    groups = [world.subgroup(ranks) for ranks in ([0, 1], [2, 3])]
    return next(each for each in groups if each is not None)


def last_two(world: Collectives) -> Collectives | None:
    return world.subgroup([1, 2])


def test_two_models_on_two_halves_of_the_world(tmp_path: Path) -> None:
    """Each model is saved and loaded by the ranks that it is sharded over, at its own pace."""

    def run(world: Collectives) -> int:
        half, number = halves(world), world.rank // 2
        model = shard(nn.Linear(5, 3), Topology(half))
        expected = {name: value.clone() for name, value in model_state_dict(model).items()}
        with Checkpointer(tmp_path / str(number), model) as checkpointer:
            for step in range(1 + number):
                checkpointer.save(step, rank_extra=world.rank)
            loaded = checkpointer.load()
        assert loaded is not None
        assert loaded.rank_extra == world.rank
        for name, value in model_state_dict(model).items():
            assert torch.equal(value, expected[name])
        return loaded.world_size

    assert run_threads(4, run) == [2] * 4
    assert verify_checkpoint(tmp_path / "1").step == 1


def test_a_model_without_rank_0(tmp_path: Path) -> None:
    """A model on ranks 1 and 2 of three: rank 0 of the world has no part in it."""

    def run(world: Collectives) -> int | None:
        group = last_two(world)
        if group is None:
            return None
        model = shard(nn.Linear(5, 3), Topology(group))
        with Checkpointer(tmp_path, model) as checkpointer:
            checkpointer.save(1)
            loaded = checkpointer.load()
            assert loaded is not None
            return loaded.world_size

    assert run_threads(3, run) == [None, 2, 2]


def test_a_hybrid_pair(tmp_path: Path) -> None:
    """Shards over two ranks and copies over two: all four save, in the world and in a part of it."""

    def run(world: Collectives) -> int | None:
        part = world.subgroup([1, 2, 3, 4])
        if part is None:
            return None
        model = shard(nn.Linear(5, 3), Topology.cut(part, [[0, 1], [2, 3]]))
        with Checkpointer(tmp_path, model) as checkpointer:
            checkpointer.save(1, rank_extra=part.rank)
            loaded = checkpointer.load()
            assert loaded is not None
            assert loaded.rank_extra == part.rank
            return loaded.world_size

    assert run_threads(5, run) == [None, 4, 4, 4, 4]
    assert verify_checkpoint(tmp_path).is_sound


def test_units_over_several_groups(tmp_path: Path) -> None:
    """Units over different groups, none of which is all ranks, are refused by name; with one over all, all save."""

    def run(world: Collectives) -> None:
        pairs = [world.subgroup(ranks) for ranks in ([0, 1], [1, 2])]
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        held = [each for each in pairs if each is not None]
        for layer, group in zip(model, held, strict=False):
            shard(layer, Topology(group))
        if len(held) == 2:
            with pytest.raises(ValueError, match=r"found '0' over 2 and '1' over a different group of 2; pass ranks="):
                Checkpointer(tmp_path, model)
        shard(model[2], Topology(world))
        assert repr(Checkpointer(tmp_path, model)).endswith(f"rank {world.rank} of 3)")

    run_threads(3, run)
