"""FSDP2's name `fully_shard` behind `flatparam.install(fsdp2=True)`, over tensor parallelism, beside torch's own."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as functions
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import flatparam
from flatparam_clients.second_door import door
from flatparam_comm import Collectives, FlatParamError
from flatparam_simdev.worlds import run_processes

pytestmark = pytest.mark.processes

WIDTH, HIDDEN = 8, 12


class Block(nn.Module):
    """A norm, a matrix that is cut by rows, and one by columns, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def spread(mesh: Any, *, meta: bool = False) -> Net:
    """Return the model of seed 0 under tensor and sequence parallelism."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        net = Net()
    for block in net.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tensor"], plan)
    return net


def mesh_of(*shape: int) -> Any:
    logging.disable(logging.WARNING)
    names = ("data", "tensor") if len(shape) == 2 else ("replicate", "data", "tensor")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(function: Any, net: Any, mesh: Any) -> Any:
    data = mesh["data"] if mesh.ndim == 2 else mesh["replicate", "data"]
    for block in net.blocks:
        function(block, mesh=data)
    return function(net, mesh=data)


def pair(shape: tuple[int, ...], *, meta: bool = False) -> tuple[Any, Any, Any]:
    """Return the model by torch's FSDP2 and by ours behind its name, and the mesh."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(*shape)
    theirs = sharded(fully_shard, spread(mesh, meta=meta), mesh)
    return theirs, sharded(door.fully_shard, spread(mesh, meta=meta), mesh), mesh


def backward(model: nn.Module, mesh: Any, number: int) -> None:
    rank = mesh["data"].get_local_rank()
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    part = x.chunk(2, 1)[mesh["tensor"].get_local_rank()] if mesh["tensor"].size() == 2 else x
    (model(part).square().sum() / x.numel()).backward()


def same_face(theirs: Any, ours: Any) -> bool:
    """Say whether two `DTensor`s are spread alike, with the same bits here and in the whole."""
    return bool(
        isinstance(ours, DTensor)
        and ours.placements == theirs.placements
        and ours.device_mesh == theirs.device_mesh
        and ours.shape == theirs.shape
        and ours.stride() == theirs.stride()
        and torch.equal(ours.to_local(), theirs.to_local())
        and torch.equal(ours.full_tensor(), theirs.full_tensor())
    )


def shown(ranks: Collectives, shape: tuple[int, ...]) -> list[str]:
    """Return what differs of the parameters and of the states."""
    theirs, ours, _ = pair(shape)
    wrong = []
    for (name, right), (other, found) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        if name != other or not same_face(right, found):
            wrong.append(f"parameter {name}: {found.placements} for {right.placements}")
    for title, ask in (
        ("state_dict", lambda model: model.state_dict()),
        ("get_model_state_dict", functions.get_model_state_dict),
    ):
        right, found = ask(theirs), ask(ours)
        if right.keys() != found.keys():
            wrong.append(f"{title}: {sorted(found)}")
        wrong += [f"{title} {name}" for name in right if not same_face(right[name], found[name])]
    options = functions.StateDictOptions(full_state_dict=True)
    right, found = (functions.get_model_state_dict(model, options=options) for model in (theirs, ours))
    wrong += [f"whole {name}" for name in right if not torch.equal(right[name], found[name])]
    return wrong


@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1), (2, 1, 2)], ids=str)
def test_parameters_are_those_of_fsdp2(shape: tuple[int, ...]) -> None:
    """Placements over both meshes, local parts, wholes and states are those of torch's FSDP2."""
    size = functools.reduce(int.__mul__, shape)
    assert run_processes(size, shown, shape) == [[]] * size


def trained(ranks: Collectives, shape: tuple[int, ...], clips: bool) -> tuple[list[str], list[float]]:
    """Train both three steps of AdamW; return what differs, and our norms."""
    theirs, ours, mesh = pair(shape)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in (theirs, ours)]
    wrong, norms = [], []
    for step in range(3):
        found = []
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, mesh, step)
            found.append({name: p.grad for name, p in model.named_parameters()})
            if clips:
                norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                found[-1]["norm"] = norm
            optimizer.step()
        for name, right in found[0].items():
            if not torch.allclose(whole(found[1][name]), whole(right), rtol=1e-4, atol=1e-6):
                wrong.append(f"step {step}: gradient of {name}")
            if name != "norm" and found[1][name].placements != right.placements:
                wrong.append(f"step {step}: gradient of {name} is {found[1][name].placements}")
        norms.append(float(whole(found[1]["norm"])) if clips else 0.0)
        for (name, right), found_ in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            off = float((whole(found_) - whole(right)).abs().max())
            if off > 1e-6:
                wrong.append(f"step {step}: {name} is off by {off}")
    return wrong, norms


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


@pytest.mark.parametrize(("shape", "clips"), [((2, 2), True), ((2, 2), False), ((2, 1, 2), True)])
def test_training_is_that_of_fsdp2(shape: tuple[int, ...], clips: bool) -> None:
    """Three steps of AdamW with torch's own clipping have FSDP2's gradients, norms and weights."""
    results = run_processes(4, trained, shape, clips)
    assert [wrong for wrong, _ in results] == [[]] * 4
    assert len({tuple(norms) for _, norms in results}) == 1


# Other ways to give values, and what is done with them


def begun(ranks: Collectives, way: str) -> list[str]:
    """Give values after sharding in one of the ways of programs, to both; return what differs, also after a step."""
    theirs, ours, mesh = pair((2, 2), meta=way == "meta")
    for model in (theirs, ours):
        if way == "meta":
            model.to_empty(device="cpu")
            with torch.no_grad():
                for name, p in model.named_parameters():
                    generator = torch.Generator().manual_seed(sum(map(ord, name)))
                    value = torch.randn(p.shape, generator=generator) / 3
                    p.copy_(distribute_tensor(value, p.device_mesh, p.placements))
        elif way == "assign":
            state = {name: value.clone().mul_(2) for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        elif way == "copy":
            model.load_state_dict({name: value.clone().mul_(2) for name, value in model.state_dict().items()})
        else:
            options = functions.StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "broadcast")
            given = {name: torch.full(p.shape, 0.5) for name, p in model.named_parameters()}
            if way == "broadcast" and ranks.rank:
                given = {}
            functions.set_model_state_dict(model, given, options=options)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in (theirs, ours)]
    pairs = zip(theirs.named_parameters(), ours.parameters(), strict=True)
    wrong = [f"{name} at first" for (name, right), found in pairs if not same_face(right, found)]
    for model, optimizer in zip((theirs, ours), optimizers, strict=True):
        backward(model, mesh, 0)
        optimizer.step()
    states = [
        functions.get_optimizer_state_dict(model, optimizer)["state"]
        for model, optimizer in zip((theirs, ours), optimizers, strict=True)
    ]
    for name, p in ours.named_parameters():
        if not torch.allclose(whole(p), whole(theirs.get_parameter(name)), atol=1e-6):
            wrong.append(f"{name} after a step")
        for key, right in states[0][name].items():
            value: Any = states[1][name][key]
            if isinstance(right, DTensor) and value.placements != right.placements:
                wrong.append(f"{name}: {key} is {value.placements}")
            if not torch.allclose(whole(value), whole(right), rtol=1e-4, atol=1e-7):
                wrong.append(f"{name}: {key}")
    return wrong


@pytest.mark.parametrize("way", ["meta", "assign", "copy", "full", "broadcast"])
def test_values_after_sharding(way: str) -> None:
    """On the meta device, and by each of torch's ways to load, parameters and moments are those of torch's FSDP2."""
    assert run_processes(4, begun, way) == [[]] * 4


def saved(ranks: Collectives, folder: str) -> None:
    """Save by `torch.distributed.checkpoint` what one has, and load it into the other, both ways."""
    models = dict(zip(("theirs", "ours"), pair((2, 2))[:2], strict=True))
    mesh = mesh_of(2, 2)
    for source, target in (("ours", "theirs"), ("theirs", "ours")):
        optimizers = {name: torch.optim.AdamW(model.parameters(), lr=0.02) for name, model in models.items()}
        backward(models[source], mesh, 0)
        optimizers[source].step()
        # torch makes a first state of optimizers only if there are no gradients.
        optimizers[source].zero_grad()
        weights, moments = functions.get_state_dict(models[source], optimizers[source])
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{source}")
        weights, moments = functions.get_state_dict(models[target], optimizers[target])
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{source}")
        functions.set_state_dict(models[target], optimizers[target], model_state_dict=weights, optim_state_dict=moments)
        for right, found in zip(models[source].parameters(), models[target].parameters(), strict=True):
            assert same_face(right, found)
            assert torch.equal(whole(p_state(optimizers[target], found)), whole(p_state(optimizers[source], right)))


def p_state(optimizer: torch.optim.Optimizer, parameter: Any) -> Any:
    return optimizer.state[parameter]["exp_avg_sq"]


def test_checkpoints_go_from_one_to_the_other(tmp_path: Path) -> None:
    """What `torch.distributed.checkpoint` saved of ours FSDP2 loads, and the other way round, to the bit."""
    run_processes(4, saved, str(tmp_path))


def programs(ranks: Collectives) -> bool:
    """Run a program of FSDP2's after `install`: it finds our class, and its parameters are over both meshes."""
    flatparam.install(fsdp2=True)
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = sharded(fully_shard, spread(mesh_of(2, 2)), mesh_of(2, 2))
    model.set_requires_gradient_sync(False)
    model.blocks[0].unshard()
    seen = model.blocks[0].up.weight
    is_full = isinstance(seen, DTensor) and seen.device_mesh.ndim == 1 and seen.shape == (HIDDEN, WIDTH)
    model.blocks[0].reshard()
    kinds = isinstance(model, FSDPModule) and type(model).__mro__[1].__module__.startswith("flatparam")
    return bool(is_full and kinds and all(p.device_mesh.ndim == 2 for p in model.parameters()))


def test_a_program_after_install() -> None:
    """After `flatparam.install(fsdp2=True)` torch's name is ours, and an unsharded parameter is one over tensor ranks."""
    assert run_processes(4, programs) == [True] * 4


def refusals(ranks: Collectives, folder: str) -> list[str]:
    """Return what is told of a directory, and of meshes that have nothing in common."""
    ours = sharded(door.fully_shard, spread(mesh_of(2, 2)), mesh_of(2, 2))
    told = []
    for attempt in (
        lambda: flatparam.Checkpointer(folder, ours).save(1),
        lambda: door.fully_shard(spread(mesh_of(2, 2)), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("other",))),
    ):
        try:
            attempt()
            told.append("")
        except (FlatParamError, OSError, ValueError) as error:
            told.append(str(error))
    return told


def test_what_is_refused(tmp_path: Path) -> None:
    """A directory refuses a matrix that is cut by rows and by columns, and meshes with nothing in common are, by name."""
    for directory, meshes in run_processes(4, refusals, str(tmp_path)):
        assert "'blocks.0.down.weight' is a DTensor with (Shard(dim=1),)" in directory
        assert "FSDP2's fully_shard cuts dimension 0 besides" in directory
        assert "fully_shard: 'blocks.0.norm.weight': expected a mesh and DTensors over different dimensions" in meshes
