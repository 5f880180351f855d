"""What is demanded of each model; the tests are in `test_short.py` and `test_models.py`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatparam import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from flatparam_comm import Collectives, run_threads
from flatparam_comm.testing import run_processes
from flatparam_core.storage.gradients import SMALL_NBYTES
from flatparam_optim.segments.step_segment import STEP_NUMEL
from flatparam_runtime import units_in
from flatparam_state import Checkpointer
from integration_tests.models.described import LAYERS, STEPS, Model
from integration_tests.models.every import named
from integration_tests.models.training import (
    RANKS,
    Setting,
    adamw,
    built,
    train,
    train_local,
    train_torch,
    wrapped,
)
from integration_tests.parity.runs import Run, assert_same, assert_same_tensors, parameters_of
from integration_tests.parity.sharded import held_parameters, join, join_parts

FSDP = FullyShardedDataParallel

PATIENCE = 1500.0
"""Seconds that a world of processes may take on a busy machine; on an idle one it takes a hundredth."""

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")


def settings(*units: str, mixed: bool) -> list[Setting]:
    """Every one in which such units are trained."""
    return [
        Setting(strategy, original, mixed, checkpointing, kind)
        for kind, strategy, original, checkpointing in itertools.product(
            units, STRATEGIES, (False, True), (False, True)
        )
    ]


# Sizes


def facts(name: str) -> dict[str, int]:
    """How large the model is: its parameters, the longest of them, and its units of blocks, the root among them."""
    numels = [parameter.numel() for parameter in named(name).build().parameters()]
    (units, _) = map(len, parts(name, Setting()))
    return {"parameters": sum(numels), "longest": max(numels), "units": units}


def parts(name: str, setting: Setting) -> list[list[list[int]]]:
    """For each rank and unit, how many elements the rank holds of each of the unit's original parameters."""

    def of_rank(group: Collectives) -> list[list[int]]:
        model = wrapped(named(name), setting, group)
        return [
            [parameter.numel() for handle in unit.handles for parameter in handle.exposure.parameters()]
            for unit in units_in(model)
        ]

    return run_threads(RANKS, of_rank, timeout=None)


def check_width(name: str) -> None:
    """Some parameter has a part on a rank that is stepped in pieces; there are long gradients and short ones."""
    long = [numel for units in parts(name, Setting(original=True)) for unit in units for numel in unit]
    assert max(long) > STEP_NUMEL.value
    nbytes = [parameter.numel() * parameter.itemsize for parameter in named(name).build().parameters()]
    assert min(nbytes) < SMALL_NBYTES.value < max(nbytes)
    if named(name).layers:
        alone = [
            unit for units in parts(name, Setting(original=True, units=LAYERS)) for unit in units if len(unit) == 1
        ]
        assert max(numel for (numel,) in alone) > STEP_NUMEL.value


# Numbers


def check_fp32(name: str, setting: Setting) -> None:
    """Losses, gradients and parameters of each step have the bits of one process."""
    ours = join(run_threads(RANKS, train, named(name), setting, timeout=None))
    assert_same(ours, train_local(named(name), setting.checkpointing))


def torch_settings(model: Model) -> list[Setting]:
    """In which torch trains the model: each choice with each other one, for the units that it can have."""
    wanted = [
        Setting("FULL_SHARD", False, True, False),
        Setting("FULL_SHARD", True, True, True),
        Setting("SHARD_GRAD_OP", False, True, True),
        Setting("SHARD_GRAD_OP", True, True, False),
    ]
    if model.layers:
        wanted += [
            Setting("FULL_SHARD", True, True, False, LAYERS),
            Setting("SHARD_GRAD_OP", False, True, True, LAYERS),
        ]
    return [setting for setting in wanted if (setting.units, setting.original) not in model.not_in_torch]


def train_torch_named(group: Collectives, name: str) -> dict[Setting, Run]:
    """One rank's part; a function that a process can find by its name."""
    return train_torch(group, named(name), torch_settings(named(name)))


@functools.lru_cache(maxsize=2)
def torch_runs(name: str) -> Mapping[bool, Run]:
    """What torch trains to without checkpointing and with it; it must not depend on anything else."""
    of_ranks = run_processes(RANKS, train_torch_named, name, timeout=PATIENCE, pg_timeout=PATIENCE)
    runs: dict[bool, Run] = {}
    for setting in torch_settings(named(name)):
        losses = [
            list(losses) for losses in zip(*(itertools.chain(*runs[setting].losses) for runs in of_ranks), strict=True)
        ]
        found = Run(losses, [], of_ranks[0][setting].parameters)
        first = runs.setdefault(setting.checkpointing, found)
        assert_same_end(found, first, f"torch's {setting}")
    return runs


def assert_same_end(found: Run, expected: Run, what: str) -> None:
    """Every loss, and the parameters after the last step, are equal bit for bit."""
    for step, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert all(map(torch.equal, mine, theirs)), f"{what}, step {step}: losses {mine}, not {theirs}"
    assert_same_tensors(found.parameters[-1], expected.parameters[-1], f"{what}: parameter")


def check_bf16(name: str, setting: Setting) -> None:
    """Losses of each step, and the parameters after the last, have the bits of torch FSDP1's on two processes."""
    ours = join(run_threads(RANKS, train, named(name), setting, timeout=None))
    assert_same_end(ours, torch_runs(name)[setting.checkpointing], str(setting))


# State


def advance(group: Collectives, model: Model, sharded: nn.Module, optimizer: Any, step: int) -> None:
    """One step of training."""
    optimizer.zero_grad()
    model.loss(sharded, step, group.rank).backward()
    optimizer.step()


def in_full(sharded: FullyShardedDataParallel) -> Any:
    """The context in which state is whole, on every rank."""
    return FSDP.state_dict_type(
        sharded,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=False),
    )


def in_parts(sharded: FullyShardedDataParallel) -> Any:
    """The context in which every rank has its own part of the state."""
    return FSDP.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)


def through_dicts(context: Callable[[FullyShardedDataParallel], Any]) -> Any:
    """Saving and loading by FSDP1's functions."""

    def carry(group: Collectives, old: Any, new: Any, directory: Path) -> None:
        with context(old[0]):
            weights, numbers = old[0].state_dict(), FSDP.optim_state_dict(*old)
        with context(new[0]):
            new[0].load_state_dict(weights)
            new[1].load_state_dict(FSDP.optim_state_dict_to_load(*new, numbers))

    return carry


def through_files(group: Collectives, old: Any, new: Any, directory: Path) -> None:
    """Saving and loading by our own checkpoints."""
    with Checkpointer(directory, *old, ranks=group) as checkpointer:
        checkpointer.save(1)
    loaded = Checkpointer(directory, *new, ranks=group).load()
    assert loaded is not None
    assert loaded.step == 1


THREADS = {"full": through_dicts(in_full), "files": through_files}
PROCESSES = {"sharded": through_dicts(in_parts)}
"""Ways from one model to another, by the world that they need: torch's sharded tensors want processes."""


def ways(model: Model) -> list[tuple[Setting, Setting]]:
    """What is saved, and what loads it: each exposure and strategy into the other, and into itself with checkpointing."""
    pairs = []
    for original in (False, True):
        before = Setting("FULL_SHARD", original)
        pairs += [
            (before, Setting("SHARD_GRAD_OP", not original)),
            (
                before.evolve(checkpointing=not model.checkpoint_is_exact),
                Setting(original=original, checkpointing=True),
            ),
        ]
        if model.layers:
            pairs.append((before, Setting("SHARD_GRAD_OP", not original, units=LAYERS)))
    return pairs


def save_and_load(
    group: Collectives, name: str, way: str, pairs: list[tuple[Setting, Setting]], directory: Path
) -> list[list[Any]]:
    """For each pair: what a rank holds when it saves, of what it loads, and of both after one more step."""
    model, found = named(name), []
    for number, (before, after) in enumerate(pairs):
        first = wrapped(model, before, group)
        old = (first, adamw(first))
        for step in range(2):
            advance(group, model, *old, step)
        second = wrapped(model, after, group, seed=1)
        new = (second, adamw(second))
        (THREADS | PROCESSES)[way](group, old, new, directory / str(number))
        held = [held_parameters(first), held_parameters(second)]
        for sharded, optimizer in (old, new):
            advance(group, model, sharded, optimizer, 2)
        found.append([*held, held_parameters(first), held_parameters(second)])
    return found


def check_saved(name: str, way: str, pairs: list[tuple[Setting, Setting]], directory: Path) -> None:
    """A fresh model that loads it, perhaps otherwise wrapped, has its parameters, and trains on to the same bits."""
    if way in THREADS:
        of_ranks = run_threads(RANKS, save_and_load, name, way, pairs, directory, timeout=None)
    else:
        of_ranks = run_processes(
            RANKS, save_and_load, name, way, pairs, directory, timeout=PATIENCE, pg_timeout=PATIENCE
        )
    for (before, after), held in zip(pairs, zip(*of_ranks, strict=True), strict=True):
        saved, loaded, went_on, followed = map(join_parts, zip(*held, strict=True))
        what = f"from {before} to {after}"
        assert_same_tensors(loaded, saved, f"{what}: loaded parameter")
        assert any(not torch.equal(went_on[key], saved[key]) for key in saved), "nothing was trained"
        assert_same_tensors(followed, went_on, f"{what}, after one more step: parameter")


def check_plain_state(name: str, setting: Setting) -> None:
    """The full state has the names and values of the plain model's, which loads it, and the other way round."""
    model = named(name)
    plain = built(model, False, seed=1)
    expected = {key: value.clone() for key, value in plain.state_dict().items()}

    def of_rank(group: Collectives) -> dict[str, Tensor]:
        sharded = wrapped(model, setting, group)
        with in_full(sharded):
            assert list(sharded.state_dict()) == list(expected)
            sharded.load_state_dict(expected)
            return dict(sharded.state_dict())

    for found in run_threads(RANKS, of_rank, timeout=None):
        assert_same_tensors(found, expected, "state")
    fresh = built(model, False)
    fresh.load_state_dict(found)
    assert_same_tensors(parameters_of(fresh), parameters_of(plain), "parameter")


def check_generates(name: str, setting: Setting) -> None:
    """The tokens are the plain model's, inside `summon_full_params`, and outside of it too."""
    model = named(name)
    assert model.generate is not None

    def of_rank(group: Collectives) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        sharded = wrapped(model, setting, group)
        optimizer = adamw(sharded)
        for step in range(STEPS):
            advance(group, model, sharded, optimizer, step)
        sharded.eval()
        with in_full(sharded):
            state = sharded.state_dict()
        with FSDP.summon_full_params(sharded, writeback=False), torch.no_grad():
            inside = model.generate(sharded)
        with torch.no_grad():
            return state, inside, model.generate(sharded)

    plain = built(model, setting.checkpointing).eval()
    for state, inside, outside in run_threads(RANKS, of_rank, timeout=None):
        plain.load_state_dict(state)
        expected = model.generate(plain)
        assert expected.shape[1] >= 6
        assert torch.equal(inside, expected)
        assert torch.equal(outside, expected)
