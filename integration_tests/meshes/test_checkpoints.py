"""Checkpoints from any mesh to any other: weights, moments and counters have the same bits, by both kinds of files."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import flatparam
from flatparam.checkpoint import state_dict as functions
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from integration_tests.meshes.checkpoints import (
    BY,
    MOST_RANKS,
    STEPS,
    Mesh,
    Place,
    alone,
    difference,
    held,
    load,
    pairs,
    save,
    step,
    stepping,
    trained,
)
from integration_tests.meshes.llama import Llama, parallelize

pytestmark = pytest.mark.processes


def save_one(number: int, place: Place, folder: Path) -> list[str]:
    """Save a model by both kinds of files, beside what it holds; return what differs from one process."""
    model, optimizer = trained(place, seed=number, steps=STEPS)
    mine = held(model, optimizer)
    if torch.distributed.get_rank() == 0:
        torch.save(mine, folder / f"{number}.pt")
    for by in BY:
        save(by, folder / f"{number}-{by}", model, optimizer)
    return [difference(mine, alone(place.kind, seed=number, steps=STEPS), exactly=False)]


def load_one(number: int, place: Place, folder: Path) -> list[str]:
    """Load into a model that was trained already, train on, and load again; return what differs from what was saved."""
    model, optimizer = trained(place, seed=number + 1000, steps=1)
    wanted = torch.load(folder / f"{number}.pt")
    told = []
    for by in (*BY, *reversed(BY)):
        load(by, folder / f"{number}-{by}", model, optimizer)
        fault = difference(held(model, optimizer), wanted, exactly=True)
        told.append(f"{by}: {fault}" if fault else "")
        step(model, optimizer, 1)
    return told


def each(
    ranks: Collectives,
    work: Callable[[int, Place, Path], list[str]],
    places: Sequence[tuple[int, Place]],
    folder: Path,
) -> list[str]:
    """Return what is wrong with the places, each with its number."""
    told = []
    for number, place in places:
        try:
            found = work(number, place, folder)
        except Exception:
            found = [traceback.format_exc()]
        told += [f"pair {number}, {place}: {fault}" for fault in found if fault]
    return told


def on_all(places: Sequence[Place], work: Callable[[int, Place, Path], list[str]], folder: Path) -> list[str]:
    """Have one world of each size `work` on the places of that size, which keep their numbers."""
    told = []
    for size in sorted({place.mesh.ranks for place in places}):
        here = [(number, place) for number, place in enumerate(places) if place.mesh.ranks == size]
        for rank, found in enumerate(run_processes(size, each, work, here, folder)):
            told += [f"rank {rank} of {size}: {fault}" for fault in found]
    return told


def check(drawn: Sequence[tuple[Place, Place]], folder: Path) -> None:
    assert on_all([before for before, _ in drawn], save_one, folder) == []
    assert on_all([after for _, after in drawn], load_one, folder) == []


SHORT = [
    (Place("llama", "originals", Mesh(2, 1, 1, 2)), Place("llama", "fully_shard", Mesh(1, 1, 1, 1))),
    (Place("mixtral", "flat", Mesh(1, 1, 2, 2)), Place("mixtral", "originals", Mesh(1, 1, 1, 3))),
    (Place("mixtral", "fully_shard", Mesh(1, 2, 2, 1)), Place("mixtral", "flat", Mesh(1, 1, 1, 3))),
    (Place("llama", "fully_shard", Mesh(1, 2, 1, 2)), Place("llama", "flat", Mesh(1, 3, 1, 1))),
]


def test_pairs_of_meshes(tmp_path: Path) -> None:
    """Between meshes of up to four ranks, by a directory and by torch's checkpoints, all bits are the same."""
    check(SHORT, tmp_path)


@pytest.mark.long
def test_many_pairs_of_meshes(tmp_path: Path) -> None:
    """So it is for thirty pairs of meshes of up to eight ranks, also with parts of different sizes, or none."""
    check(pairs(30, MOST_RANKS), tmp_path)


def refused(ranks: Collectives, folder: Path, number: int) -> str:
    """Return what is said about `DTensor`s in a unit over a process group, in no unit, or over a foreign mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = parallelize(Llama(), mesh["tensor"])
    wrap = functools.partial(flatparam.FullyShardedDataParallel, process_group=mesh.get_group("data"))
    grouped = wrap(parallelize(Llama(), mesh["tensor"]))
    outside = wrap(model, ignored_modules=[model.layers[0].mlp])
    whole = distribute_tensor(torch.zeros(32, 16), mesh["data"], [Shard(0)])
    foreign = {"layers.0.mlp.w1.weight": whole}
    calls: list[Callable[[], object]] = [
        lambda: functions.get_model_state_dict(grouped),
        lambda: functions.get_optimizer_state_dict(grouped, stepping(grouped)),
        lambda: flatparam.Checkpointer(folder, outside).save(1),
        lambda: flatparam.publish(outside, lambda name, tensor: None),
        lambda: functions.set_model_state_dict(grouped, foreign, options=functions.StateDictOptions(strict=False)),
    ]
    try:
        calls[number]()
    except (RuntimeError, flatparam.CheckpointError) as error:
        return str(error)
    return ""


def test_parts_are_never_lost_in_silence(tmp_path: Path) -> None:
    """What would save one rank's part of a `DTensor` for all, or load a different one, is an error on every rank."""
    wanted = [*["slices of one mesh"] * 2, *["that no unit holds"] * 2, "whose last dimensions are these"]
    for number, words in enumerate(wanted):
        # A rank that fails while others wait breaks their group: so each has a world of its own.
        assert all(words in told for told in run_processes(4, refused, tmp_path, number))
