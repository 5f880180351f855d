"""Whole tensors of models on meshes: published from them, and loaded into them from files that know no mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import flatparam
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from flatparam_publish import Mailbox, Publisher, Receiver
from integration_tests.meshes.checkpoints import Mesh, Place, alone, difference, held, made, step, stepping
from integration_tests.meshes.llama import Llama
from integration_tests.meshes.mixtral import Mixtral

pytestmark = pytest.mark.processes

PLACES = [
    Place("llama", "flat", Mesh(1, 2, 1, 2)),
    Place("llama", "originals", Mesh(2, 1, 1, 2)),
    Place("mixtral", "fully_shard", Mesh(1, 1, 2, 2)),
    Place("mixtral", "originals", Mesh(1, 2, 2, 1)),
    Place("mixtral", "flat", Mesh(1, 1, 1, 3)),
]


def weights(kind: str, *, seed: int, steps: int) -> dict[str, Tensor]:
    """Return what one process has after so many steps."""
    return {name: value for name, value in alone(kind, seed=seed, steps=steps).items() if " " not in name}


def publish(ranks: Collectives, place: Place, folder: Path) -> list[str]:
    """Publish by a function on each rank, into a folder, and through a mailbox, in two versions."""
    model = made(place)
    optimizer = stepping(model)
    step(model, optimizer, 1)
    found: dict[str, Tensor] = {}
    called: list[str] = []
    flatparam.publish(model, found.__setitem__, every_rank=True)
    flatparam.publish(model, lambda name, tensor: called.append(name))
    flatparam.publish(model, folder / "model.safetensors")
    flatparam.publish(model, folder / "small", bucket=64)
    publisher = Publisher(model, Mailbox(folder / "mail"))
    publisher.publish()
    first = difference(found, weights(place.kind, seed=0, steps=1), exactly=False)
    step(model, optimizer, 1)
    publisher.publish()
    # The gradients of `step` begin again.
    seen = bool(called) == (ranks.rank == 0) and called in ([], list(found))
    return [
        first,
        "" if seen else f"the sink was called with {called}",
        *_last(model, found, folder, ranks.rank),
    ]


def _last(model: torch.nn.Module, before: dict[str, Tensor], folder: Path, rank: int) -> list[str]:
    after: dict[str, Tensor] = {}
    flatparam.publish(model, after.__setitem__, every_rank=True)
    if rank:
        return []
    files = [load_file(folder / "model.safetensors"), load_file(folder / "small" / "model.safetensors")]
    told = [difference(each, before, exactly=True) for each in files]
    kind = Llama() if "layers.0.mlp.w1.weight" in before else Mixtral()
    Receiver(kind, Mailbox(folder / "mail")).receive()
    mail = {name: value.detach() for name, value in kind.named_parameters()}
    changed = "" if difference(before, after, exactly=True) else "nothing has changed"
    return [*told, difference(mail, after, exactly=True), changed]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_published_tensors_are_whole(place: Place, tmp_path: Path) -> None:
    """A sink, files and a mailbox get the tensors of one process, also of what is cut along two dimensions."""
    for told in run_processes(place.mesh.ranks, publish, place, tmp_path):
        assert not any(told), told


def load(ranks: Collectives, place: Place, folder: Path) -> list[str]:
    """Load whole tensors into a model that was trained already, twice, and train on."""
    wanted = load_file(folder / "model.safetensors")
    model = made(place, seed=1)
    optimizer = stepping(model)
    step(model, optimizer, 1)
    told = []
    for _ in range(2):
        assert flatparam.load_pretrained(model, folder, strict=True) is model
        weights = {name: value for name, value in held(model, optimizer).items() if " " not in name}
        told.append(difference(weights, wanted, exactly=True))
        step(model, optimizer, 1)
    return told


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_whole_tensors_are_cut(place: Place, tmp_path: Path) -> None:
    """Each rank gets its part of the tensors in a safetensors folder, bit for bit, again and again."""
    save_file(weights(place.kind, seed=0, steps=1), tmp_path / "model.safetensors")
    for told in run_processes(place.mesh.ranks, load, place, tmp_path):
        assert not any(told), told
