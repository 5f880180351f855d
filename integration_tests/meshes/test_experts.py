"""Training with expert parallelism beside one process that has all experts and all data."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatparam
from flatparam_comm import Collectives, FlatParamError
from flatparam_comm.testing import run_processes
from flatparam_meshes import hold_experts
from flatparam_runtime import summon_full_params
from integration_tests.meshes.llama import backward, whole
from integration_tests.meshes.mixtral import EXPERTS, Mixtral
from integration_tests.meshes.training import MOST

pytestmark = pytest.mark.processes

RANKS, STEPS = 4, 2


@attrs.frozen
class Way:
    """How experts are spread: over `parallel` ranks; the others of the four hold copies of them, or shards."""

    door: str
    parallel: int = 2
    distributed: bool = False
    """Whether expert parameters are `DTensor`s over the ranks of expert parallelism, as torchtitan has them."""
    holds: bool = True
    synchronises: bool = True
    idle: bool = False
    """Whether some ranks' experts get no token in the first step."""


def made(way: Way, **arguments: Any) -> nn.Module:
    """Return the model: experts over one dimension of a mesh, and all else over both."""
    from torch.distributed.device_mesh import init_device_mesh

    logging.disable(logging.WARNING)
    mesh = init_device_mesh("cpu", (RANKS // way.parallel, way.parallel), mesh_dim_names=("copies", "experts"))
    torch.manual_seed(0)
    model: Any = Mixtral(mesh.get_group("experts"), idle=way.idle)
    if way.distributed:
        from torch.distributed.tensor import DTensor, Shard

        for name, parameter in list(model.moe.experts.named_parameters()):
            spread = DTensor.from_local(parameter.detach(), mesh["experts"], [Shard(0)], run_check=False)
            setattr(model.moe.experts, name, nn.Parameter(spread))
    if way.door == "fully_shard":
        flatparam.fully_shard(model.moe.experts, mesh=mesh["copies"], **arguments)
        flatparam.fully_shard(model, mesh=dist.group.WORLD, **arguments)
    else:
        arguments["use_orig_params"] = way.door != "flat"
        wrap = functools.partial(flatparam.FullyShardedDataParallel, **arguments)
        model.moe.experts = wrap(model.moe.experts, device_mesh=mesh["copies"])
        model = wrap(model, process_group=dist.group.WORLD)
    if way.holds:
        assert hold_experts(model) == 1
    return model


def shown(model: nn.Module, *, gradients: bool) -> dict[str, Tensor]:
    """Return every parameter, or its gradient, whole; experts of all ranks in their order."""
    found = {}
    with summon_full_params(model, writeback=False, with_grads=gradients):
        for name, p in model.named_parameters():
            value: Any = p.grad if gradients else p.detach()
            value = whole(value).clone()
            if "experts" in name and value.shape[0] < EXPERTS:
                mine: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(mine, (dist.get_rank(), value))
                value = torch.cat([v for _, v in sorted(mine, key=lambda item: item[0])])[:EXPERTS]
            found[name.replace("_fsdp_wrapped_module.", "")] = value
    return found


def train(ranks: Collectives, way: Way) -> tuple[list[str], list[float]]:
    model = made(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    alone = Mixtral(idle=way.idle)
    beside = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    told, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        beside.zero_grad()
        for number in range(2 * step, 2 * step + 2):
            if way.door == "fully_shard":
                model.set_requires_gradient_sync(way.synchronises or number % 2 == 1)  # type: ignore[operator]
            backward(model, number, ranks.rank)
            for rank in range(RANKS):
                backward(alone, number, rank)
        for parameter in alone.parameters():
            assert parameter.grad is not None
            parameter.grad /= RANKS
        for name, gradient in shown(model, gradients=True).items():
            right = alone.get_parameter(name).grad
            assert right is not None
            if not torch.allclose(gradient, right, rtol=1e-4, atol=1e-6):
                told.append(f"step {step}: {name} times {float((gradient * right).sum() / (right * right).sum()):.2f}")
        if way.door == "fully_shard":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
        else:
            norm = model.clip_grad_norm_(MOST)  # type: ignore[operator]
        right_norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), MOST)
        norms.append(float(norm))
        if not torch.allclose(norm, right_norm, rtol=1e-4):
            told.append(f"step {step}: norm {float(norm)}, expected {float(right_norm)}")
        optimizer.step()
        beside.step()
        for name, weight in shown(model, gradients=False).items():
            if not torch.allclose(weight, alone.get_parameter(name).detach(), atol=1e-4):
                told.append(f"step {step}: {name} is a different weight")
    return told, norms


@pytest.mark.parametrize(
    "way",
    [
        Way("flat"),
        Way("originals"),
        Way("fully_shard"),
        Way("originals", parallel=4),
        Way("fully_shard", distributed=True),
        Way("flat", distributed=True),
        Way("fully_shard", synchronises=False),
        Way("originals", parallel=4, idle=True),
        Way("fully_shard", idle=True),
    ],
    ids=str,
)
def test_experts_train_as_in_one_process(way: Way) -> None:
    """Every gradient, the norm and the weights are those of one process, without a divisor of the user's."""
    results = run_processes(RANKS, train, way)
    assert [told for told, _ in results] == [[]] * RANKS
    assert len({tuple(norms) for _, norms in results}) == 1


def accumulated(ranks: Collectives, door: str, reduction: str | None) -> tuple[list[str], str]:
    """Return the parameters whose gradients are not the mean of all micro-batches, and what a weight is told."""
    arguments: Any = {} if reduction is None else {"reduction": reduction}
    warnings.simplefilter("error")
    model: Any = made(Way(door), **arguments)
    torch.manual_seed(0)
    alone = Mixtral()
    for number in range(2):
        with model.accumulate():
            backward(model, number, ranks.rank)
        for rank in range(RANKS):
            backward(alone, number, rank)
    model.reduce_gradients()
    found, right = shown(model, gradients=True), {n: p.grad for n, p in alone.named_parameters()}
    assert found.keys() == right.keys()
    # Each rank has two micro-batches, which count alike.
    wrong = [n for n, each in right.items() if not torch.allclose(2 * RANKS * found[n], each, rtol=1e-4, atol=1e-6)]  # type: ignore[operator, arg-type]
    try:
        with model.accumulate(weight=3):
            pass
    except FlatParamError as error:
        return wrong, str(error)
    return wrong, ""


@pytest.mark.parametrize(
    ("door", "reduction"),
    [("flat", None), ("originals", None), ("fully_shard", None), ("originals", "exact")],
)
def test_micro_batches(door: str, reduction: str | None) -> None:
    """`accumulate()` gives experts the mean of all; a weight, which other ranks' tokens do not have, is refused."""
    for wrong, told in run_processes(RANKS, accumulated, door, reduction):
        assert not wrong
        assert "'moe.experts'" in told
        assert "multiply the loss by its weight" in told


def warned(ranks: Collectives) -> tuple[bool, float]:
    model = made(Way("originals", holds=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward(model, 0, ranks.rank)
    torch.manual_seed(0)
    alone = Mixtral()
    for rank in range(RANKS):
        backward(alone, 0, rank)
    right = alone.moe.experts.up.grad
    assert right is not None
    found = shown(model, gradients=True)["moe.experts.up"]
    factor = float((found * right).sum() / (right * right).sum()) * RANKS
    return any("hold_experts" in str(each.message) for each in caught), round(factor, 3)


def test_without_the_call_a_warning_says_so() -> None:
    """Without `hold_experts` an expert's gradient is divided by its own ranks, as in FSDP1 and FSDP2, with a warning."""
    assert run_processes(RANKS, warned) == [(True, 2.0)] * RANKS


def uneven(ranks: Collectives) -> str:
    """A model over four ranks, with a unit of two of them and none of the others."""
    groups = [dist.new_group([0, 1]), dist.new_group([2]), dist.new_group([3])]
    mine = groups[0] if ranks.rank < 2 else groups[ranks.rank - 1]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    flatparam.fully_shard(model[0], mesh=mine)
    flatparam.fully_shard(model, mesh=dist.group.WORLD)
    try:
        hold_experts(model)
    except FlatParamError as error:
        return str(error)
    return ""


def test_groups_of_several_sizes_are_refused() -> None:
    """If the groups do not cut the ranks of the model into equal parts, every rank is told, with the groups."""
    for told in run_processes(RANKS, uneven):
        assert "found [(0, 1), (2,), (3,)]" in told
