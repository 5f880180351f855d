"""Models on any mesh, the state that they hold, and checkpoints of it: made on one mesh, and loaded on another."""

from __future__ import annotations

import functools
import logging
import random
import warnings
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn

import flatparam
from flatparam.checkpoint import state_dict as functions
from flatparam_meshes import hold_experts
from flatparam_runtime import summon_full_params
from integration_tests.meshes.engines import OURS
from integration_tests.meshes.llama import Llama, parallelize
from integration_tests.meshes.mixtral import Mixtral

KINDS: Final = ("llama", "mixtral")
SEED: Final = 42
MOST_RANKS: Final = 8


@attrs.frozen
class Mesh:
    """The sizes of a mesh of ranks; those of `expert` are ranks of data parallelism for all but experts."""

    replicate: int
    shard: int
    expert: int
    tensor: int

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.expert * self.tensor

    def __str__(self) -> str:
        return f"{self.replicate}x{self.shard}x{self.expert}x{self.tensor}"


@attrs.frozen
class Place:
    """A model on a mesh, sharded by one door."""

    kind: str
    engine: str
    mesh: Mesh

    def __str__(self) -> str:
        return f"{self.kind}-{self.engine}-{self.mesh}"


def meshes(most: int = MOST_RANKS) -> list[Mesh]:
    """Return all meshes of at most `most` ranks; the models have dimensions that three ranks cut unevenly."""
    sizes = range(1, 5)
    found = [Mesh(r, s, e, t) for r in (1, 2) for s in (1, 2, 3, 4, 8) for e in sizes for t in sizes]
    return [mesh for mesh in found if mesh.ranks <= most]


def pairs(count: int, most: int = MOST_RANKS) -> list[tuple[Place, Place]]:
    """Return ordered pairs of places, each over two different meshes: the first ones of a list that is always alike."""
    draw = random.Random(SEED)
    known = meshes(most)
    found = []
    for number in range(count):
        before, after = draw.sample(known, 2)
        # Each model comes by each door and goes on behind each.
        kind, doors = KINDS[number % 2], (OURS[number // 2 % 3], OURS[(number // 2 + number // 6) % 3])
        found.append((Place(kind, doors[0], before), Place(kind, doors[1], after)))
    return found


# The models


@functools.lru_cache
def _root(mesh: Mesh) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    warnings.filterwarnings("ignore")
    names = ("replicate", "shard", "expert", "tensor")
    root = init_device_mesh("cpu", attrs.astuple(mesh), mesh_dim_names=names)
    root["shard", "expert"]._flatten("data")
    return root


def made(place: Place, *, seed: int = 0) -> nn.Module:
    """Return the model with the weights of `seed`, on its mesh and sharded, as a program with torchtitan's mesh has it."""
    logging.disable(logging.WARNING)
    root = _root(place.mesh)
    is_hybrid = place.mesh.replicate > 1
    data = root["replicate", "data"] if is_hybrid else root["data"]
    torch.manual_seed(seed)
    if place.kind == "llama":
        llama: Any = parallelize(Llama(), root["tensor"])
        for number, block in enumerate(llama.layers):
            llama.layers[number] = sharded(block, place.engine, data)
        return sharded(llama, place.engine, data)
    mixtral: Any = spread(Mixtral(), root)
    here = root["replicate", "shard"] if is_hybrid else root["shard"]
    mixtral.moe.experts = sharded(mixtral.moe.experts, place.engine, here)
    model = sharded(mixtral, place.engine, data)
    if place.mesh.expert > 1:
        assert hold_experts(model) == 1
    return model


def spread(model: Any, root: Any) -> nn.Module:
    """Cut experts over the ranks of expert and of tensor parallelism, and the dense parts over the latter."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, root["tensor"], {"embedding": RowwiseParallel(), "output": ColwiseParallel()})
    cut = {"up": 2, "down": 1}
    is_spread = root["tensor"].size() > 1
    mesh = root["expert", "tensor"] if is_spread else root["expert"]
    for name, dimension in cut.items():
        placements: Any = [Shard(0), Shard(dimension)] if is_spread else [Shard(0)]
        value = model.moe.experts.get_parameter(name).detach()
        setattr(model.moe.experts, name, nn.Parameter(distribute_tensor(value, mesh, placements)))
    return model  # type: ignore[no-any-return]


def sharded(module: nn.Module, engine: str, mesh: Any) -> nn.Module:
    """Shard `module` over the data-parallel `mesh`, of one or two dimensions."""
    if engine == "fully_shard":
        return flatparam.fully_shard(module, mesh=mesh)
    strategies = flatparam.ShardingStrategy
    return flatparam.FullyShardedDataParallel(
        module,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=engine == "originals",
        sharding_strategy=strategies.FULL_SHARD if mesh.ndim == 1 else strategies.HYBRID_SHARD,
    )


def stepping(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Make steps with gradients that depend on each weight alone, so that all meshes compute alike."""
    for number in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * (number + 1) + 0.25
        optimizer.step()
    optimizer.zero_grad()


def trained(place: Place, *, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = made(place, seed=seed)
    optimizer = stepping(model)
    step(model, optimizer, steps)
    return model, optimizer


def alone(kind: str, *, seed: int, steps: int) -> dict[str, Tensor]:
    """Return what one process without any sharding holds after so many steps; see `held`."""
    torch.manual_seed(seed)
    model = Llama() if kind == "llama" else Mixtral()
    optimizer = stepping(model)
    step(model, optimizer, steps)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone()
        found |= {f"{name} {each}": value.clone() for each, value in optimizer.state[parameter].items()}
    return found


def held(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all that there is, whole: weights, and the moments and counters of AdamW."""
    found = {}
    with summon_full_params(model, writeback=False):
        for name, parameter in model.named_parameters():
            found[name.replace("_fsdp_wrapped_module.", "")] = whole(parameter.detach()).clone()
    _, states = functions.get_state_dict(model, optimizer)
    for fqn, values in states["state"].items():
        found |= {f"{fqn} {name}": whole(value).clone() for name, value in values.items()}
    return found


# Checkpoints of them

BY: Final = ("directory", "dcp")
STEPS: Final = 2


def save(by: str, folder: Path, model: Any, optimizer: Any) -> None:
    """Save into `folder`, by a `Checkpointer` or by `torch.distributed.checkpoint`."""
    if by == "directory":
        with flatparam.Checkpointer(folder, model, optimizer) as checkpointer:
            checkpointer.save(STEPS)
        return
    import torch.distributed.checkpoint as dcp

    state, moments = functions.get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)


def load(by: str, folder: Path, model: Any, optimizer: Any) -> None:
    """Load what `save` has saved on any mesh."""
    if by == "directory":
        flatparam.Checkpointer(folder, model, optimizer).load()
        return
    import torch.distributed.checkpoint as dcp

    state, moments = functions.get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": moments}, checkpoint_id=folder)
    functions.set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)


def whole(tensor: Any) -> Tensor:
    """Return a tensor, or all of a `DTensor`.

    One dimension of the mesh at a time: `full_tensor()` of torch 2.13 mixes up the parts of a dimension that is cut
    twice in parts of different sizes, if the program has flattened the two dimensions of the mesh into one.
    """
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor import Replicate

        placements = list(tensor.placements)
        for dimension in reversed(range(len(placements))):
            placements[dimension] = Replicate()
            tensor = tensor.redistribute(placements=placements)
        tensor = tensor.to_local()
    found: Tensor = tensor
    return found


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor], *, exactly: bool) -> str:
    """Return what is wrong with `found`, in words; nothing if all is right."""
    if found.keys() != wanted.keys():
        return f"other names: {sorted(found.keys() ^ wanted.keys())}"
    for name, value in wanted.items():
        got = found[name]
        if got.shape != value.shape:
            return f"{name} has shape {tuple(got.shape)}, expected {tuple(value.shape)}"
        if not (torch.equal(got, value) if exactly else torch.allclose(got, value, rtol=1e-5, atol=1e-7)):
            return f"{name} has other values"
    return ""
