"""`DTensor`s on the meta device: torch's functions of values see them, so that values are those of the whole."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import flatparam
from flatparam_comm import Collectives, FlatParamError
from flatparam_runtime import summon_full_params
from flatparam_simdev.worlds import run_processes

pytestmark = pytest.mark.processes


class Net(nn.Module):
    """A norm, weights that are cut by rows and by columns, and a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.empty(8))
        self.register_buffer("shift", torch.empty(8))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x)))) * self.scale + self.shift


def on_meta(mesh: Any) -> Net:
    """Return the model on the meta device, spread over `mesh`."""
    logging.disable(logging.WARNING)
    with torch.device("meta"):
        net = Net()
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, mesh, plan)
    assert all(p.is_meta for p in net.parameters())
    return net


def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))


def give(module: nn.Module) -> None:
    """Give a module's own tensors memory and values, as a `param_init_fn` does."""
    module.to_empty(device="cpu", recurse=False)
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def by_torch(mesh: Any) -> dict[str, Tensor]:
    """Return the values that torch gives the `DTensor`s of a model that is sharded over nothing else."""
    net = on_meta(mesh)
    torch.manual_seed(7)
    for module in [net, *net.children()]:
        give(module)
    return {name: whole(value).clone() for name, value in net.state_dict().items()}


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def values(model: nn.Module) -> dict[str, Tensor]:
    with summon_full_params(model, writeback=False):
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {name.replace("_fsdp_wrapped_module.", ""): whole(p).clone() for name, p in tensors}


def wrapped(net: nn.Module, mesh: Any, door: str, **arguments: Any) -> Any:
    if door == "fully_shard":
        flatparam.fully_shard(net, mesh=mesh["data"])
        return net
    return flatparam.FullyShardedDataParallel(
        net, device_mesh=mesh["data"], use_orig_params=door == "originals", **arguments
    )


def begun(ranks: Collectives, door: str, given: bool) -> list[str]:
    """Return the names of tensors whose values are not torch's own."""
    mesh = mesh_of(2, 2)
    wanted = by_torch(mesh["tensor"])
    torch.manual_seed(7)
    found = values(wrapped(on_meta(mesh["tensor"]), mesh, door, **({"param_init_fn": give} if given else {})))
    assert found.keys() == wanted.keys()
    limit = wanted["down.weight"].abs().max()
    # By twelve inputs, and not by the six of a part.
    assert 0.2 < float(limit) <= 12**-0.5
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(
    ("door", "given"), [("flat", True), ("originals", True), ("originals", False), ("fully_shard", False)]
)
def test_values_are_those_that_torch_gives_dtensors(door: str, given: bool) -> None:
    """`param_init_fn`, or modules' own methods, give the bits that they give `DTensor`s which nothing else shards."""
    assert run_processes(4, begun, door, given) == [[]] * 4


# Beside FSDP2: shard on the meta device, take memory, give values


def give_all(model: nn.Module) -> None:
    """Give every parameter, whole or as a `DTensor`, values that depend on the place in the whole."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            value: Any = torch.randn(parameter.shape, generator=generator) / 3
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
        model.get_buffer("shift").zero_()


def later(ranks: Collectives, way: str) -> list[list[str]]:
    """Shard on the meta device, take memory and give values, here and by FSDP2; name what differs at each point."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(2, 2)
    theirs, ours = on_meta(mesh["tensor"]), on_meta(mesh["tensor"])
    fully_shard(theirs, mesh=mesh["data"])
    theirs.to_empty(device="cpu")
    give_all(theirs)
    flatparam.fully_shard(ours, mesh=mesh["data"])
    ours.to_empty(device="cpu")
    if way == "in place":
        with summon_full_params(ours):
            give_all(ours)
    else:
        ours.load_state_dict({name: on_tensor(value, mesh) for name, value in theirs.state_dict().items()})
    points = [differing(theirs, ours)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False) for model in (theirs, ours)]
    for step in range(2):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        # What is cut by columns lies by columns here, and products of it have other last bits on some processors.
        points.append(differing(theirs, ours, tolerance=1e-6))
    return points


def on_tensor(value: Any, mesh: Any) -> Tensor:
    """Return a `DTensor` over tensor parallelism alone, of which each rank has all; of what is none, itself."""
    is_spread = isinstance(value, DTensor) and value.device_mesh.ndim == 2
    return distribute_tensor(whole(value), mesh["tensor"], [Replicate()]) if is_spread else whole(value)


def differing(theirs: nn.Module, ours: nn.Module, tolerance: float = 0.0) -> list[str]:
    wanted = {name: whole(value) for name, value in theirs.state_dict().items()}
    found = values(ours)
    assert found.keys() == wanted.keys()
    return [n for n, value in wanted.items() if not torch.allclose(found[n], value, rtol=tolerance, atol=tolerance)]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot flatten inputs that are cut in between")
@pytest.mark.parametrize("way", ["in place", "loaded"])
def test_values_after_sharding_are_those_of_fsdp2(way: str) -> None:
    """After `to_empty()`, values that are given in place or loaded are those of torch's FSDP2, and train as there."""
    assert run_processes(4, later, way) == [[[], [], []]] * 4


# What is refused, and what is left for later


class Bare(nn.Module):
    """A module that cannot give itself values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def bare(mesh: Any) -> nn.Module:
    with torch.device("meta"):
        net = nn.Sequential(Bare(), nn.Linear(4, 4))
    spread = distribute_tensor(net[0].weight.detach(), mesh["tensor"], [Shard(1)])
    net[0].weight = nn.Parameter(spread)
    parallelize_module(net, mesh["tensor"], {"1": ColwiseParallel()})
    return net


def refused(ranks: Collectives) -> tuple[list[str], bool]:
    logging.disable(logging.WARNING)
    mesh, told = mesh_of(1, 2), []

    def put_plain(module: nn.Module) -> None:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(torch.zeros(parameter.shape)))

    for door, arguments in (
        ("flat", {}),
        ("fully_shard", {}),
        ("originals", {"param_init_fn": put_plain}),
        ("flat", {"param_init_fn": lambda module: None}),
    ):
        try:
            wrapped(bare(mesh), mesh, door, **arguments)
        except (FlatParamError, AttributeError, ValueError) as error:
            told.append(str(error))
    net: Any = bare(mesh)
    flatparam.fully_shard(net, mesh=mesh["data"], values_later=True)
    given = torch.arange(16.0).view(4, 4)
    state = {"0.weight": given, "1.weight": given + 1, "1.bias": given[0]}
    net.load_state_dict(
        {name: distribute_tensor(value, mesh["tensor"], [Replicate()]) for name, value in state.items()}
    )
    found = values(net)
    return told, torch.equal(found["0.weight"], given) and torch.equal(found["1.weight"], given + 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_has_no_values_is_refused_or_waits() -> None:
    """A module that cannot begin, and a function that puts no DTensor, are named; with `values_later` a load begins."""
    for told, waited in run_processes(2, refused):
        no_way, in_place, plain, nothing = told
        assert "Bare has DTensors on the meta device and no reset_parameters()" in no_way
        assert "a Bare is on the meta device and has no reset_parameters()" in in_place
        assert "param_init_fn put a Parameter of shape (4, 4) in the place of 'weight' of Bare" in plain
        assert "param_init_fn left ['weight'] of Bare on the meta device" in nothing
        assert waited
