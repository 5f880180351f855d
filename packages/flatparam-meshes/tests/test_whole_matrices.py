"""Optimizers of whole matrices on `DTensor`s: the whole is that of all ranks, and each matrix is stepped once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flatparam
from flatparam.checkpoint import state_dict as functions
from flatparam_clients.second_door import door
from flatparam_comm import Collectives, ProcessGroupCollectives
from flatparam_meshes import hold_experts
from flatparam_optim import Adafactor, Muon, Shampoo, TransformersAdafactor
from flatparam_runtime import summon_full_params
from flatparam_simdev.worlds import run_processes

pytestmark = pytest.mark.processes

STEPS = 3
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
SHAPES = {
    "rows": (6, 4),
    "columns": (4, 6),
    "uneven": (5, 4),
    "copied": (4, 4),
    "plain": (4, 3),
    "bias": (5,),
}
CUTS = {"rows": Shard(0), "columns": Shard(1), "uneven": Shard(0), "copied": Replicate(), "bias": Shard(0)}
"""How each parameter is cut over tensor parallelism; `plain` is no DTensor."""


class Weights(nn.Module):
    """Parameters without a computation: gradients are given, so that no order of sums is in the numbers."""

    def __init__(self, shapes: Shapes, mesh: Any = None, cuts: Mapping[str, Any] = CUTS) -> None:
        super().__init__()
        for name, shape in shapes.items():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            value: Any = torch.randn(shape, generator=generator)
            if mesh is not None and name in cuts:
                cut = cuts[name]
                value = distribute_tensor(value, mesh, cut if isinstance(cut, tuple) else [cut])
            setattr(self, name, nn.Parameter(value))

    def forward(self, factors: Mapping[str, Tensor]) -> Tensor:
        """Return a loss of which `factors` are the gradients."""
        loss: Any = 0.0
        for name, parameter in self.named_parameters():
            factor: Any = factors[name]
            if isinstance(parameter, DTensor):
                factor = distribute_tensor(factor, parameter.device_mesh, parameter.placements)
                loss = loss + (parameter * factor).sum().full_tensor()
            else:
                loss = loss + (parameter * factor).sum()
        return loss


def factors(shapes: Shapes, step: int) -> dict[str, Tensor]:
    """The gradients of a step, the same on every rank, so that the mean over ranks has their bits."""
    made = {name: torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * (step + 1)) for name in shapes}
    return {name: torch.randn(shape, generator=made[name]) for name, shape in shapes.items()}


@attrs.frozen
class Way:
    """A door, and the sizes of (data, tensor), or of (replicate, shard, tensor)."""

    door: str
    shape: tuple[int, ...] = (2, 2)

    @property
    def ranks(self) -> int:
        return functools.reduce(int.__mul__, self.shape)


def made(way: Way) -> nn.Module:
    """Return the weights over the mesh of `way`, sharded."""
    logging.disable(logging.WARNING)
    names = ("data", "tensor") if len(way.shape) == 2 else ("replicate", "shard", "tensor")
    mesh: Any = init_device_mesh("cpu", way.shape, mesh_dim_names=names)
    model = Weights(SHAPES, mesh["tensor"])
    data = mesh["data"] if len(way.shape) == 2 else mesh["replicate", "shard"]
    if way.door == "fully_shard":
        flatparam.fully_shard(model, mesh=data)
        return model
    strategy = "FULL_SHARD" if data.ndim == 1 else "HYBRID_SHARD"
    return flatparam.FullyShardedDataParallel(
        model,
        device_mesh=data,
        use_orig_params=way.door == "originals",
        sharding_strategy=flatparam.ShardingStrategy[strategy],
    )


def shown(model: nn.Module) -> dict[str, Tensor]:
    with summon_full_params(model, writeback=False):
        return {name.rpartition(".")[2]: whole(p.detach()).clone() for name, p in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def train(model: nn.Module, optimizers: Any, steps: range, shapes: Shapes = SHAPES) -> None:
    for step in steps:
        model(factors(shapes, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[list[Any], list[Any]], list[Any]]]] = {
    "muon": (
        lambda parameters: Muon(parameters, lr=0.02, adamw_lr=0.01),
        lambda two, one: [torch.optim.Muon(two, lr=0.02), *(torch.optim.AdamW([p], lr=0.01) for p in one)],
    ),
    "adafactor": (
        lambda parameters: Adafactor(parameters, lr=0.05),
        lambda two, one: [torch.optim.Adafactor([*two, *one], lr=0.05)],
    ),
    "transformers": (
        lambda parameters: TransformersAdafactor(parameters, beta1=0.9),
        lambda two, one: [TransformersAdafactor([*two, *one], beta1=0.9)],
    ),
    "shampoo": (
        lambda parameters: Shampoo(parameters, every=2, adamw_lr=0.01),
        lambda two, one: [Shampoo([*two, *one], every=2, adamw_lr=0.01)],
    ),
}
"""Ours on the mesh, and those of one process: torch's, but for those that torch has not."""
ALL = ("adafactor", "transformers")
"""The kinds that step every parameter as a whole."""


def alone(kind: str, steps: int = STEPS, shapes: Shapes = SHAPES) -> dict[str, Tensor]:
    """Return the weights that one process has after so many steps."""
    model = Weights(shapes)
    two = [p for p in model.parameters() if p.dim() == 2]
    one = [p for p in model.parameters() if p.dim() == 1]
    train(model, KINDS[kind][1](two, one), range(steps), shapes)
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(ranks: Collectives, way: Way) -> dict[str, tuple[dict[str, Tensor], int]]:
    found = {}
    for kind, (make, _) in KINDS.items():
        model = made(way)
        optimizer = make(model.parameters())
        train(model, [optimizer], range(STEPS))
        found[kind] = shown(model), optimizer.whole_steps
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(
    "way",
    [
        Way("flat"),
        Way("originals"),
        Way("fully_shard"),
        Way("fully_shard", (1, 3)),
        Way("originals", (2, 1, 2)),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_one_process(way: Way) -> None:
    """Weights have the bits of one process, whatever is cut by rows or columns, evenly or not; each is stepped once."""
    results = run_processes(way.ranks, trained, way)
    for kind in KINDS:
        wanted = alone(kind)
        for found in results:
            assert_same(found[kind][0], wanted)
        stepped = {name for name, value in wanted.items() if value.dim() == 2 or kind in ALL}
        # Of what is not cut, each rank of tensor parallelism steps its copy with those that share this one.
        apart = stepped & {"copied", "plain"}
        times = len(stepped - apart) + len(apart) * way.shape[-1]
        assert sum(found[kind][1] for found in results) == STEPS * times


def orders(ranks: Collectives) -> list[tuple[int, ...]]:
    model = made(Way("flat", (1, 1)))
    with summon_full_params(model):
        return [p.to_local().stride() for name, p in model.named_parameters() if name.endswith("columns")]


def test_a_cut_over_one_rank_is_none() -> None:
    """What is cut by columns over a mesh of one rank lies by rows, as it did; so its products have the same bits."""
    assert run_processes(1, orders) == [[(SHAPES["columns"][1], 1)]]


# The state


def save(ranks: Collectives, way: Way, folder: str) -> None:
    for kind, (make, _) in KINDS.items():
        model = made(way)
        optimizer = make(model.parameters())
        train(model, [optimizer], range(2))
        with flatparam.Checkpointer(f"{folder}/{kind}", model, optimizer) as checkpointer:
            checkpointer.save(2)


def resume(ranks: Collectives, way: Way, folder: str, again: str) -> dict[str, dict[str, Tensor]]:
    """Load what was saved, save it again, and train two steps more."""
    found = {}
    for kind, (make, _) in KINDS.items():
        model = made(way)
        optimizer = make(model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        flatparam.Checkpointer(f"{folder}/{kind}", model, optimizer).load()
        flatparam.Checkpointer(f"{again}/{kind}", model, optimizer).save(2)
        train(model, [optimizer], range(2, 4))
        found[kind] = shown(model)
    return found


def test_a_directory_at_other_sizes(tmp_path: Path) -> None:
    """Training goes on to the bit after 2 -> 1 -> 4 -> 2 ranks of tensor parallelism, whoever kept the state."""
    ways = [Way("originals", (2, 1)), Way("flat", (1, 4)), Way("fully_shard", (2, 2))]
    run_processes(4, save, Way("flat", (2, 2)), str(tmp_path / "0"))
    for number, way in enumerate(ways):
        folders = str(tmp_path / str(number)), str(tmp_path / str(number + 1))
        for found in run_processes(way.ranks, resume, way, *folders):
            for kind in KINDS:
                assert_same(found[kind], alone(kind, 4))


def save_by_torch(ranks: Collectives, way: Way, folder: str) -> None:
    for kind, (make, _) in KINDS.items():
        model = made(way)
        optimizer = make(model.parameters())
        train(model, [optimizer], range(2))
        state, moments = functions.get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=f"{folder}/{kind}")


def resume_by_torch(ranks: Collectives, way: Way, folder: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for kind, (make, _) in KINDS.items():
        model = made(way)
        optimizer = make(model.parameters())
        state, moments = functions.get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": moments}, checkpoint_id=f"{folder}/{kind}")
        functions.set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
        train(model, [optimizer], range(2, 4))
        found[kind] = shown(model)
    return found


@pytest.mark.long
def test_torchs_checkpoints_at_other_sizes(tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` has the state, and training goes on to the bit on one and on four ranks."""
    run_processes(4, save_by_torch, Way("originals", (2, 2)), str(tmp_path))
    for way in (Way("fully_shard", (2, 1)), Way("originals", (1, 4))):
        for found in run_processes(way.ranks, resume_by_torch, way, str(tmp_path)):
            for kind in KINDS:
                assert_same(found[kind], alone(kind, 4))


# Stacks of matrices: experts


STACKS = {"experts": (4, 6, 5), "columns": (3, 4, 6), "plain": (3, 4, 6), "matrix": (6, 4)}
CUT_STACKS = {"experts": Shard(0), "columns": Shard(2), "matrix": Shard(1)}


def of_stacks(parameters: Any) -> Muon:
    return Muon(parameters, lr=0.02, matrices=lambda name, shape: len(shape) > 1)


def stacks_alone(shapes: Shapes) -> dict[str, Tensor]:
    """Return the stacks that one process has, which steps each of their matrices as a parameter."""
    model = Weights(shapes)
    apart = {
        name: [nn.Parameter(each.clone()) for each in p.detach().view(-1, *p.shape[-2:])]
        for name, p in model.named_parameters()
    }
    optimizer = torch.optim.Muon([each for stack in apart.values() for each in stack], lr=0.02)
    for step in range(STEPS):
        for name, gradient in factors(shapes, step).items():
            parts = gradient.view(-1, *gradient.shape[-2:])
            for each, part in zip(apart[name], parts, strict=True):
                each.grad = part
        optimizer.step()
    return {name: torch.stack(stack).detach().view(shapes[name]) for name, stack in apart.items()}


def stacked(ranks: Collectives, door: str) -> tuple[dict[str, Tensor], int]:
    logging.disable(logging.WARNING)
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = Weights(STACKS, mesh["tensor"], CUT_STACKS)
    if door == "fully_shard":
        flatparam.fully_shard(model, mesh=mesh["data"])
    else:
        model = flatparam.FullyShardedDataParallel(model, device_mesh=mesh["data"], use_orig_params=door == "originals")
    optimizer = of_stacks(model.parameters())
    train(model, [optimizer], range(STEPS), STACKS)
    return shown(model), optimizer.whole_steps


@pytest.mark.parametrize("door", ["flat", "originals", "fully_shard"])
def test_each_matrix_of_a_stack_is_stepped(door: str) -> None:
    """A stack has the bits of its matrices, each stepped by itself: by its own owner, or all together if cut across."""
    results = run_processes(4, stacked, door)
    for found, _ in results:
        assert_same(found, stacks_alone(STACKS))
    # Four experts and a matrix; `columns` comes to one owner; `plain` is stepped by both ranks of tensor parallelism.
    assert sum(count for _, count in results) == STEPS * (4 + 1 + 1 + 2 * 3)


class WithExperts(nn.Module):
    """Experts in a unit of their own, over the ranks that hold the same ones."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.inner: Any = Weights({"experts": STACKS["experts"]}, mesh["experts"], CUT_STACKS)
        self.outer = Weights({name: STACKS[name] for name in ("plain", "matrix")})

    def forward(self, factors: Mapping[str, Tensor]) -> Tensor:
        # `hold_experts` divides by four ranks the sum of two, whose experts have the tokens of four.
        return self.inner(factors) * 2 + self.outer(factors)


def with_experts(ranks: Collectives, door: str) -> tuple[dict[str, Tensor], int]:
    logging.disable(logging.WARNING)
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    model: Any = WithExperts(mesh)
    if door == "fully_shard":
        flatparam.fully_shard(model.inner, mesh=mesh["copies"])
        flatparam.fully_shard(model, mesh=dist.group.WORLD)
    else:
        wrap = functools.partial(flatparam.FullyShardedDataParallel, use_orig_params=door == "originals")
        model.inner = wrap(model.inner, device_mesh=mesh["copies"])
        model = wrap(model, process_group=dist.group.WORLD)
    assert hold_experts(model) == 1
    optimizer = of_stacks(model.parameters())
    train(model, [optimizer], range(STEPS), STACKS)
    return shown(model), optimizer.whole_steps


@pytest.mark.parametrize("door", ["flat", "originals", "fully_shard"])
def test_experts_over_a_dimension_of_the_mesh(door: str) -> None:
    """Experts that are a DTensor over ranks are stepped one by one, each by one of all ranks that hold parts."""
    results = run_processes(4, with_experts, door)
    wanted = stacks_alone(STACKS)
    for found, _ in results:
        assert_same(found, {name: wanted[name] for name in ("experts", "plain", "matrix")})
    assert sum(count for _, count in results) == STEPS * (4 + 3 + 1)


# Bytes, and other parts


def sent(ranks: Collectives, cut: Any, kind: str) -> dict[str, int]:
    """Return the bytes that this rank sends in a step of one matrix of 8 times 4, under each label."""
    logging.disable(logging.WARNING)
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    shapes = {"matrix": (8, 4)}
    model = Weights(shapes, mesh["tensor"], {"matrix": cut})
    flatparam.fully_shard(model, mesh=mesh["data"])
    optimizer = KINDS[kind][0](model.parameters())
    train(model, [optimizer], range(1), shapes)
    model(factors(shapes, 1)).backward()
    found: dict[str, int] = {}
    given = ProcessGroupCollectives.all_to_all

    def counted(group: Any, output: Tensor, tensor: Tensor, *, label: str = "", **numels: Any) -> Any:
        found[label] = found.get(label, 0) + tensor.nbytes
        return given(group, output, tensor, label=label, **numels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupCollectives, "all_to_all", counted)
        optimizer.step()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [Shard(0), Shard(1), Replicate()], ids=str)
def test_bytes_are_those_of_the_formula(cut: Any, kind: str) -> None:
    """Over all ranks `b s (E - e)` go to the owner and `c (E - e)` back; a copy travels once for each that there is."""
    results = run_processes(4, sent, cut, kind)
    both = {"matrices to their owners": {"muon": 2, "adafactor": 8, "transformers": 8, "shampoo": 4}[kind]}
    both["updates of matrices"] = {"muon": 2, "adafactor": 4, "transformers": 4, "shampoo": 4}[kind]
    for label, nbytes in both.items():
        total = sum(found.get(label, 0) for found in results)
        if isinstance(cut, Replicate):
            # Two ranks of data parallelism have half each; and that twice, in either rank of tensor parallelism.
            assert total == 2 * nbytes * (32 - 16)
        else:
            # Each of four ranks has a quarter.
            assert total == nbytes * (32 - 8)


def boxed(ranks: Collectives, door_: str) -> dict[str, dict[str, Tensor]]:
    """Train a matrix that is cut along both of its dimensions, or whose part is cut by rows besides."""
    logging.disable(logging.WARNING)
    found = {}
    for kind, (make, _) in KINDS.items():
        if door_ == "both":
            mesh: Any = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "one", "other"))
            model = Weights({"matrix": (7, 6)}, mesh["one", "other"], {"matrix": (Shard(0), Shard(1))})
            flatparam.fully_shard(model, mesh=mesh["data"])
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
            model = Weights({"matrix": (7, 6)}, mesh["tensor"], {"matrix": Shard(1)})
            door.fully_shard(model, mesh=mesh["data"])
        optimizer = make(model.parameters())
        train(model, [optimizer], range(STEPS), {"matrix": (7, 6)})
        found[kind] = {"matrix": whole(model.matrix) if door_ != "both" else shown(model)["matrix"]}
    return found


@pytest.mark.parametrize("door_", ["both", "FSDP2"])
def test_parts_that_are_boxes(door_: str) -> None:
    """A matrix of which ranks hold boxes, by a DTensor of two dimensions or by FSDP2's door, has the bits of one process."""
    for found in run_processes(8 if door_ == "both" else 4, boxed, door_):
        for kind in KINDS:
            assert_same(found[kind], alone(kind, shapes={"matrix": (7, 6)}))
