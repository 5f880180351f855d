"""What needs torch's process groups: sharded state dicts in memory, and torch's distributed checkpoints."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from flatparam import FullyShardedDataParallel
from flatparam.checkpoint.state_dict import get_state_dict, set_state_dict
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from integration_tests.programs.recipes import Program
from integration_tests.programs.running import (
    NothingToReduceError,
    Training,
    aliases_of,
    shard,
    thresholds_of,
)
from integration_tests.programs.saving import (
    Case,
    Expected,
    Found,
    NothingToSaveError,
    Whole,
    beginning,
    compare,
    expect,
    going_on,
)
from integration_tests.programs.trees import build
from integration_tests.state.ours import settings_of

MOST_RANKS = 3


def check_in_processes(cases: Sequence[Case]) -> int:
    """The property for each of these cases, in one or two worlds of each size; returns how many of them could be loaded.

    Raises:
        RankError: with the first case that fails.
    """
    count = 0
    with tempfile.TemporaryDirectory() as directory:
        numbered = [(case, Path(directory) / str(number)) for number, case in enumerate(cases)]
        apart = [(case, path) for case, path in numbered if case[3].way == "distributed"]
        for ranks in range(1, MOST_RANKS + 1):
            here = [(case, path) for case, path in numbered if case[1].ranks == ranks]
            count += _in_world(ranks, _save_all, here)
        for ranks in range(1, MOST_RANKS + 1):
            count += _in_world(ranks, _load_all, [(case, path) for case, path in apart if case[2].ranks == ranks])
    return count


def _in_world(ranks: int, each: Any, cases: Sequence[tuple[Case, Path]]) -> int:
    return run_processes(ranks, each, cases)[0] if cases else 0


def _save_all(world: Collectives, cases: Sequence[tuple[Case, Path]]) -> int:
    return sum(_attempt(case, world, path, saves=True) for case, path in cases)


def _load_all(world: Collectives, cases: Sequence[tuple[Case, Path]]) -> int:
    return sum(_attempt(case, world, path, saves=False) for case, path in cases)


def _attempt(case: Case, world: Collectives, path: Path, *, saves: bool) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _check(case, world, path, saves)
    except (Exception, CheckpointException) as error:
        as_code = "".join(f"    {part!r},\n" for part in case)
        raise AssertionError(f"{type(error).__name__}: {error}\n{as_code}") from error


def _check(case: Case, world: Collectives, path: Path, saves: bool) -> bool:
    """Save, or load what was saved, or both; returns whether it was loaded."""
    program, before, after, saving = case
    try:
        expected = expect(program, before, after, saving)
    except (NothingToReduceError, NothingToSaveError):
        return False
    if not expected.fits or (saving.way == "distributed" and not _has_all_states(program, expected)):
        return False
    given = None
    if saves:
        with thresholds_of(before, but="comm"):  # the group is made already
            given = _save(world, case, path)
    if saves and saving.way == "distributed":
        return False
    with thresholds_of(after, but="comm"):
        found = _load(world, case, path, given)
    mine = attrs.evolve(expected, numbers=[expected.numbers[world.rank]])
    compare([found], mine, aliases_of(program))
    return True


def _has_all_states(program: Program, expected: Expected) -> bool:
    """DCP wants in the file whatever there is in the state to load into, where every parameter has a state."""
    trained = {name for name, p in build(program.tree, program.ties).named_parameters() if p.requires_grad}
    return trained <= expected.loaded.keys() == expected.states


def _save(group: Collectives, case: Case, path: Path) -> Any:
    program, configuration, _, saving = case
    model = shard(program, configuration, group)
    training = Training.begin(program, Whole(model, [group.rank], configuration))
    training.run(program.steps[: saving.after])
    if saving.way == "distributed":
        state, states = get_state_dict(model, training.optimizers)
        dcp.save({"model": state, "optimizer": states}, checkpoint_id=path)
        return None
    with _form(model, saving.way):
        optim_state_dict = FullyShardedDataParallel.optim_state_dict
        return model.state_dict(), [optim_state_dict(model, each) for each in training.optimizers]


def _form(model: Any, way: str) -> Any:
    form = settings_of("sharded", _use_dtensor=True) if way == "dtensor" else settings_of(way)
    return FullyShardedDataParallel.state_dict_type(model, *form)


def _load(group: Collectives, case: Case, path: Path, given: Any) -> Found:
    program, _, configuration, saving = case
    model, training = beginning(group, program, configuration, saving)
    if saving.way == "distributed":
        state, states = get_state_dict(model, training.optimizers)
        whole = {"model": state, "optimizer": states}
        dcp.load(whole, checkpoint_id=path)
        set_state_dict(model, training.optimizers, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
    else:
        to_load = FullyShardedDataParallel.optim_state_dict_to_load
        with _form(model, saving.way):
            model.load_state_dict(given[0])
            for optimizer, each in zip(training.optimizers, given[1], strict=True):
                optimizer.load_state_dict(to_load(model, optimizer, each))
    return going_on(training, saving)
