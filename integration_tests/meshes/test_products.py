"""Products of mesh dimensions: certificates of the hardest, and one set of bits where contributions are the same."""

from __future__ import annotations

import hashlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flatparam_certify.meshes import DIMENSIONS, MeshSizes
from flatparam_comm import Collectives, ProcessGroupCollectives
from flatparam_comm.testing import run_processes
from integration_tests.meshes import spread
from integration_tests.meshes.page import SPREAD, certificate

pytestmark = pytest.mark.processes

STEPS, SEED = 2, 0


@pytest.mark.parametrize(
    ("case", "engine", "mesh"),
    [
        ("MIXTRAL", "originals", "dp_shard=2,ep=2"),
        pytest.param("MIXTRAL", "originals", "dp_shard=2,tp=2,ep=2", marks=pytest.mark.long),
        pytest.param("MIXTRAL", "in_place", "dp_replicate=2,ep=2,pp=2", marks=pytest.mark.long),
        pytest.param("LLAMA", "ringed", "dp_shard=2,cp=2,tp=2", marks=pytest.mark.long),
    ],
)
def test_certified(case: str, engine: str, mesh: str) -> None:
    """Losses, gradients, norms and weights are those of one process; `nox -s meshes` has every pair and triple."""
    found = certificate(SPREAD, case, engine, mesh)
    assert found.is_right, found.table()
    assert all(not run.skipped for run in found.runs)


def asked_by_clipping(ranks: Collectives, door: str) -> tuple[float, list[tuple[int, ...]]]:
    """Return the norm, and the global numbers of the ranks of each exchange that clipping makes, in order."""
    torch.set_num_threads(1)
    sizes = MeshSizes.of({"dp_shard": 2, "ep": 2, "tp": 2})
    mesh = init_device_mesh("cpu", sizes.sizes, mesh_dim_names=DIMENSIONS)
    trainer: Any = spread.spread(door, spread.MIXTRAL.model(SEED), mesh)
    given = spread.MIXTRAL.draw(SEED, 0, 0, sizes.data_rank(dist.get_rank()))
    trainer.accumulate(spread.MIXTRAL.loss_of, [given], False)
    asked: list[tuple[int, ...]] = []
    reduce = ProcessGroupCollectives.all_reduce

    def noted(group: ProcessGroupCollectives, *arguments: Any, **how: Any) -> Any:
        asked.append(tuple(dist.get_process_group_ranks(group.group)))
        return reduce(group, *arguments, **how)

    with mock.patch.object(ProcessGroupCollectives, "all_reduce", noted):
        norm = float(trainer.clip(1.0))
    return norm, asked


@pytest.mark.parametrize("door", ["originals", "fully_shard"])
def test_clipping_asks_each_group_once(door: str) -> None:
    """The norm is one number on all ranks, that of one process, and takes one exchange for each dimension of the mesh."""
    results = run_processes(8, asked_by_clipping, door)
    assert len({norm for norm, _ in results}) == 1
    model = spread.MIXTRAL.model(SEED)
    for rank in range(4):
        (spread.MIXTRAL.loss_of(model, spread.MIXTRAL.draw(SEED, 0, 0, rank)) / 4).backward()  # type: ignore[no-untyped-call]
    alone = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    assert results[0][0] == pytest.approx(float(alone), rel=1e-5)
    for rank, (_, asked) in enumerate(results):
        # All shards, those of one expert, the ranks of the other experts, and tensor parallelism.
        assert sorted(map(len, asked)) == [2, 2, 2, 4], asked
        assert len({*asked}) == 4
        assert all(rank in each for each in asked)


def trained(ranks: Collectives, sizes: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the first gradients, and a hash of each weight after some steps, of the parameters of this stage."""
    torch.set_num_threads(1)
    mesh_sizes = MeshSizes.of(sizes)
    mesh = init_device_mesh("cpu", mesh_sizes.sizes, mesh_dim_names=DIMENSIONS)
    trainer: Any = spread.exact(spread.LLAMA.model(SEED), mesh)
    optimizer = torch.optim.SGD(trainer.module.parameters(), lr=0.1, momentum=0.9)
    first: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        given = spread.LLAMA.draw(SEED, step, 0, mesh_sizes.data_rank(dist.get_rank()))
        trainer.accumulate(spread.LLAMA.loss_of, [given], False)
        first = first or {name: grad.clone() for name, grad in trainer.gradients().items()}
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: bytes(each.contiguous().numpy().tobytes()) for name, each in trainer.weights().items()}
    return first, {name: hashlib.sha256(each).hexdigest() for name, each in weights.items()}


def of_all(sizes: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what the stages have found together; ranks of one stage have found the same."""
    results = run_processes(MeshSizes.of(sizes).ranks, trained, sizes)
    gradients, hashes = {}, {}
    for first, told in results:
        for name, each in told.items():
            assert hashes.setdefault(name, each) == each
            assert torch.equal(gradients.setdefault(name, first[name]), first[name])
    return gradients, hashes


@pytest.mark.parametrize(
    "meshes",
    [
        [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4, "pp": 2}],
        [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "tp": 2, "pp": 2}],
    ],
    ids=["data", "tensor"],
)
def test_exact_sums_have_one_set_of_bits(meshes: list[dict[str, int]]) -> None:
    """With `reduction="exact"` shards, copies and stages change no bit of what the same micro-batches give."""
    gradients, hashes = of_all(meshes[0])
    for other in meshes[1:]:
        assert of_all(other)[1] == hashes
    if "tp" in meshes[0]:
        return
    # The sum of four float32 numbers of some size is exact in float64.
    parts = []
    for rank in range(4):
        model = spread.LLAMA.model(SEED)
        spread.LLAMA.loss_of(model, spread.LLAMA.draw(SEED, 0, 0, rank)).backward()  # type: ignore[no-untyped-call]
        parts.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, found in gradients.items():
        total = torch.stack([part[name].double() for part in parts]).sum(0)
        assert torch.equal(found, (total / 4).float()), name
