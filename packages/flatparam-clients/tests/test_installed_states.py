"""After `install()` sharded states are FSDP1's, which programs that run unchanged take apart by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as state_functions
import torch.distributed.fsdp as package
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import flatparam
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.processes

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class Uneven(nn.Module):
    """Dimensions that no number of ranks divides, and some with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 1, bias=False)
        self.cube = nn.Parameter(torch.randn(2, 3, 2))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).sum() + self.cube.sum()


def trained(
    ranks: Collectives, *, strategy: str = "FULL_SHARD", originals: bool, with_mesh: bool, seed: int = 0
) -> tuple[Any, Any]:
    """A model that the names of FSDP1 wrap, and its optimizer, after a step."""
    torch.manual_seed(seed)
    model = package.FullyShardedDataParallel(
        Uneven(),
        sharding_strategy=package.ShardingStrategy[strategy],
        use_orig_params=originals,
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", (ranks.size,)) if with_mesh else None,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stepped(model, optimizer, ranks)
    return model, optimizer


def stepped(model: Any, optimizer: Any, ranks: Collectives) -> float:
    """The loss before the step."""
    loss = model(torch.ones(2, 5) * (ranks.rank + 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def sharded(model: Any, optimizer: Any, config: Any = None, of_optimizer: Any = None) -> dict[str, Any]:
    kind = package.StateDictType.SHARDED_STATE_DICT
    wrapper = package.FullyShardedDataParallel
    with warnings.catch_warnings(), wrapper.state_dict_type(model, kind, config, of_optimizer):
        warnings.simplefilter("ignore")
        return {"model": model.state_dict(), "optimizer": wrapper.optim_state_dict(model, optimizer)}


def form(value: Any) -> Any:
    """What a program can see of a tensor, but its values: the order of a sum may change their last bits."""
    if isinstance(value, ShardedTensor):
        facts = value.metadata()
        placed = [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in facts.shards_metadata]
        local = [(s.metadata.shard_offsets, form(s.tensor)) for s in value.local_shards()]
        return "ShardedTensor", placed, facts.size, str(facts.tensor_properties), local
    if isinstance(value, DTensor):
        mesh = value.device_mesh.mesh.tolist()
        return "DTensor", value.shape, value.stride(), value.placements, mesh, form(value.to_local())
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.requires_grad, value.device
    return {key: form(each) for key, each in value.items()} if isinstance(value, dict) else value


def forms(ranks: Collectives) -> list[Any]:
    """Those of models and optimizers of every setting, by the names of FSDP1 as they are now."""
    found = []
    for strategy in STRATEGIES:
        for originals in (False, True):
            for with_mesh in (False, True):
                model, optimizer = trained(ranks, strategy=strategy, originals=originals, with_mesh=with_mesh)
                state = sharded(model, optimizer)
                # A flat parameter that is not sharded has, with torch, an optimizer state that is.
                if strategy == "NO_SHARD" and not originals:
                    del state["optimizer"]["state"]
                found.append(form(state))
    return found


def beside_torch(ranks: Collectives) -> None:
    theirs = forms(ranks)
    with flatparam.install():
        assert forms(ranks) == theirs


@pytest.mark.parametrize("size", [2, 3])
def test_the_form_is_fsdp1s(size: int) -> None:
    """Offsets, sizes, placements, meshes and dtypes on each rank are those of torch's FSDP1, of model and optimizer."""
    run_processes(size, beside_torch)


def by_hand(ranks: Collectives) -> None:
    with flatparam.install():
        for originals in (False, True):
            model, optimizer = trained(ranks, originals=originals, with_mesh=False)
            state = sharded(model, optimizer)
            whole = {
                "model": model.state_dict(),
                "optimizer": package.FullyShardedDataParallel.optim_state_dict(model, optimizer),
            }
            assert_equal(_gather_state_dict(state), whole)
            first = _gather_state_dict(state, cpu_offload=True, ranks_only=(0,))
            assert_equal(first, whole if ranks.rank == 0 else {})
            # As fairseq2 does it.
            parts = {
                name: value.local_tensor() if value.local_shards() else torch.empty(0)
                for name, value in state["model"].items()
                if isinstance(value, ShardedTensor)
            }
            for name, part in parts.items():
                chunks = [*whole["model"][name].chunk(ranks.size), *[torch.empty(0)] * ranks.size]
                assert torch.equal(part, chunks[ranks.rank]), name


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("size", [2, 3])
def test_programs_take_it_apart(size: int) -> None:
    """Torch's `_gather_state_dict` makes the full states of it, and a rank's only part is its chunk."""
    run_processes(size, by_hand)


def checkpoints(ranks: Collectives, folder: Path) -> None:
    with flatparam.install():
        wrapper = package.FullyShardedDataParallel
        for number, (originals, with_mesh) in enumerate([(False, False), (True, False), (True, True)]):
            model, optimizer = trained(ranks, originals=originals, with_mesh=with_mesh)
            state = sharded(model, optimizer)
            dcp.save(state, checkpoint_id=folder / f"{number}")
            saving = dcp.async_save(state, checkpoint_id=folder / f"{number}-async")
            expected = stepped(model, optimizer, ranks)
            saving.result()
            for name in (f"{number}", f"{number}-async"):
                model, optimizer = trained(ranks, originals=not originals, with_mesh=with_mesh, seed=1)
                there = sharded(model, optimizer)
                dcp.load(there, checkpoint_id=folder / name)
                kind = package.StateDictType.SHARDED_STATE_DICT
                with wrapper.state_dict_type(model, kind):
                    model.load_state_dict(there["model"])
                    optimizer.load_state_dict(wrapper.optim_state_dict_to_load(model, optimizer, there["optimizer"]))
                assert stepped(model, optimizer, ranks) == expected


@pytest.mark.parametrize("size", [2, 3])
def test_checkpoints_of_it(size: int, tmp_path: Path) -> None:
    """`dcp.save`, `dcp.async_save` and `dcp.load`, of tensors with fewer rows than ranks too, go on as without a stop."""
    run_processes(size, checkpoints, tmp_path)


class Bystander(nn.Linear):
    """A model that nobody shards."""


def others(ranks: Collectives, folder: Path) -> None:
    model = Bystander(2, 2)
    with flatparam.install():
        dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / "plain").result()
        if ranks.rank == 0:
            dcp.async_save({"model": model}, checkpoint_id=folder / "alone", no_dist=True).result()
    dist.barrier()
    for name in ("plain", "alone"):
        state = {"model": {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}}
        dcp.load(state, checkpoint_id=folder / name)
        assert all(map(torch.any, state["model"].values()))


def test_async_save_of_others(tmp_path: Path) -> None:
    """After `install()` torch's `async_save` saves a model that is not sharded, on all ranks or on one."""
    run_processes(2, others, tmp_path)


def mixed(ranks: Collectives, folder: Path) -> None:
    with flatparam.install():
        model, optimizer = trained(ranks, originals=True, with_mesh=False)
        for name in ("one", "other", "one more"):
            dcp.save(sharded(model, optimizer), checkpoint_id=folder / name)
            stepped(model, optimizer, ranks)
        state = sharded(model, optimizer)
        told = r"rank 1 loads the checkpoint \S*other, and rank 0 loads \S*one, which is a different one"
        with pytest.raises(CheckpointException, match=told):
            dcp.load(state, checkpoint_id=folder / ("other" if ranks.rank else "one"))
        # One checkpoint by two paths is one.
        dcp.load(state, checkpoint_id=folder / ("one" if ranks.rank else "other/../one"))
        dcp.load(state, checkpoint_id=folder / "one more")


def test_ranks_that_load_different_checkpoints_are_told(tmp_path: Path) -> None:
    """After `install()` torch's `load` of another checkpoint on one rank raises on every rank, before anything is read."""
    pytest.importorskip("flatparam_files")
    run_processes(2, mixed, tmp_path)


def choices(ranks: Collectives) -> None:
    model, optimizer = trained(ranks, originals=True, with_mesh=False)
    del model, optimizer
    with flatparam.install():
        model, optimizer = trained(ranks, originals=True, with_mesh=False)
        kept = {"dim_0_chunks": False}
        asked = sharded(
            model,
            optimizer,
            flatparam.ShardedStateDictConfig(**kept),
            flatparam.ShardedOptimStateDictConfig(**kept),
        )
        installed = sharded(model, optimizer)
        by_function = state_functions.get_state_dict(model, optimizer)
        assert [form(each) for each in by_function] == [
            form(installed["model"]),
            form(installed["optimizer"]),
        ]
    kind = flatparam.StateDictType.SHARDED_STATE_DICT
    with flatparam.FullyShardedDataParallel.state_dict_type(model, kind):
        direct = {
            "model": model.state_dict(),
            "optimizer": flatparam.FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
    assert form(asked) == form(direct)
    assert form(installed) != form(direct)
    for state in (asked, installed):
        model.load_state_dict(state["model"])


def test_the_choice() -> None:
    """`dim_0_chunks=False` keeps what each rank owns; so does every state without `install()`; both forms load."""
    run_processes(2, choices)


def plain(module: nn.Module) -> nn.Module:
    return module


def ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def fsdp2(module: nn.Module) -> nn.Module:
    return package.fully_shard(module)


def fsdp1(module: nn.Module) -> nn.Module:
    return package.FullyShardedDataParallel(module)


def optimizer_alone(ranks: Collectives) -> None:
    functions = state_functions
    with flatparam.install():
        for wrap in (plain, ddp, fsdp2, fsdp1):
            models = [wrap(nn.Linear(3, 4)) for _ in range(2)]
            optimizers = [
                torch.optim.Adam(model.parameters(), lr=rate) for model, rate in zip(models, (0.1, 0.2), strict=True)
            ]
            models[0](torch.ones(2, 3)).sum().backward()
            optimizers[0].step()
            _, state = functions.get_state_dict(models[0], optimizers[0])
            before = [parameter.detach().clone() for parameter in models[1].parameters()]
            found = functions.set_state_dict(models[1], optimizers[1], model_state_dict={}, optim_state_dict=state)
            assert not any(found), wrap.__name__
            assert optimizers[1].param_groups[0]["lr"] == 0.1, wrap.__name__
            assert len(optimizers[1].state) == len(optimizers[0].state) > 0, wrap.__name__
            for parameter, value in zip(models[1].parameters(), before, strict=True):
                assert torch.equal(parameter, value), wrap.__name__


def test_an_optimizer_alone() -> None:
    """`set_state_dict` with an empty model state loads the optimizer alone, of models that others shard or nobody does too."""
    run_processes(2, optimizer_alone)
