"""Ranks that diverge: by running different units, by copies that are never averaged, by buffers of their own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy

from flatparam import ShardingStrategy
from flatparam_comm import Collectives
from flatparam_runtime import DivergenceError
from integration_tests.lifted.our_half import (
    RANKS,
    STEPS,
    batch,
    both_exposures,
    full_parameters,
    mean_gradients,
    mlp,
    on_two_ranks,
    seeded,
    sgd,
    square_loss,
    train,
    train_local,
    wrapped,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.runs import assert_same_tensors, parameters_of


class Branches(nn.Module):
    """Two units of one size, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x)


def assert_names_both(message: str) -> None:
    for rank, branch in enumerate(BRANCHES):
        assert f"rank {rank} was at the gather of unit {branch!r} (weight, bias" in message


BRANCHES = ("left", "right")
"""By rank."""


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name.rpartition(".")[2]: buffer.clone() for name, buffer in model.named_buffers()}


def torch_l01(group: Collectives, use_orig_params: bool) -> Tensor:
    model = fsdp1(seeded(Branches), nn.Linear, use_orig_params=use_orig_params)
    return model(batch(0, 0), BRANCHES[group.rank]).detach()


def torch_l03(group: Collectives, use_orig_params: bool) -> tuple[bool, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    strategy = TorchStrategy.HYBRID_SHARD
    model = fsdp1(seeded(mlp), sharding_strategy=strategy, device_mesh=mesh, use_orig_params=use_orig_params)
    train(model, sgd(model.parameters()), group.rank)
    return model.sharding_strategy is TorchStrategy.NO_SHARD, full_parameters(model)


def torch_l12(group: Collectives, use_orig_params: bool) -> dict[str, Tensor]:
    model = fsdp1(seeded(normed), use_orig_params=use_orig_params)
    train(model, sgd(model.parameters()), group.rank)
    return buffers(model)


def ours_l01_later(group: Collectives, use_orig_params: bool) -> list[str]:
    """The ranks part after a step in which they did the same: what each says, and what its optimizer has changed."""
    model = wrapped(seeded(Branches), nn.Linear, use_orig_params=use_orig_params)
    model(batch(0, group.rank), "left").square().mean().backward()
    before = full_parameters(model)
    messages = []
    for recorded in (True, False):
        with pytest.raises(DivergenceError) as caught, torch.set_grad_enabled(recorded):
            model(batch(0, group.rank), BRANCHES[group.rank]).square().mean().backward()
        messages.append(str(caught.value))
    assert_same_tensors(full_parameters(model), before, "parameter")
    return messages


def ours_l03(group: Collectives, use_orig_params: bool) -> dict[str, dict[str, Tensor]]:
    """The same mesh as torch's, and the other way round."""
    return {
        f"{shape}": trained_in(
            group,
            use_orig_params,
            device_mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")),
        )
        for shape in ((2, 1), (1, 2))
    }


def trained_in(group: Collectives, use_orig_params: bool, **where: Any) -> dict[str, Tensor]:
    strategy = ShardingStrategy.HYBRID_SHARD
    model = wrapped(seeded(mlp), nn.Linear, sharding_strategy=strategy, use_orig_params=use_orig_params, **where)
    train(model, sgd(model.parameters()), group.rank)
    return full_parameters(model)


@both_exposures
def test_l01_torch_gathers_weights_of_another_unit(processes: Outcomes, use_orig_params: bool) -> None:
    """L-01: ranks that run different units of one size get outputs of neither unit in torch, and no error."""
    reference = seeded(Branches)
    for found in processes.values(torch_l01, use_orig_params):
        for branch in BRANCHES:
            assert not torch.allclose(found, reference(batch(0, 0), branch), atol=0.1)


@both_exposures
@pytest.mark.parametrize("recorded", [True, False], ids=["training", "inference"])
def test_l01_ranks_that_run_different_units_are_told(use_orig_params: bool, recorded: bool) -> None:
    """L-01: it is an error on every rank, before any output is made, and names what each rank was at."""

    def rank(group: Collectives) -> str:
        model = wrapped(seeded(Branches), nn.Linear, use_orig_params=use_orig_params)
        with pytest.raises(DivergenceError) as caught, torch.set_grad_enabled(recorded):
            model(batch(0, 0), BRANCHES[group.rank])
        return str(caught.value)

    for message in on_two_ranks(rank):
        assert_names_both(message)


@both_exposures
def test_l01_ranks_that_part_later_are_told(processes: Outcomes, use_orig_params: bool) -> None:
    """L-01: over gloo, ranks that part after a step in common are told at the end of the pass, before any can step."""
    for messages in processes.values(ours_l01_later, use_orig_params):
        for message in messages:
            assert_names_both(message)


@both_exposures
def test_l01_ranks_that_run_the_same_units_are_right(use_orig_params: bool) -> None:
    """L-01: where all take the same branch, whichever, the outputs are those of the unsharded model."""

    def rank(group: Collectives) -> list[Tensor]:
        model = wrapped(seeded(Branches), nn.Linear, use_orig_params=use_orig_params)
        return [model(batch(0, group.rank), branch).detach() for branch in BRANCHES]

    reference = seeded(Branches)
    for number, outputs in enumerate(on_two_ranks(rank)):
        for branch, found in zip(BRANCHES, outputs, strict=True):
            assert torch.equal(found, reference(batch(0, number), branch))


@both_exposures
def test_l03_torch_never_averages_over_copies(processes: Outcomes, use_orig_params: bool) -> None:
    """L-03: HYBRID_SHARD over a mesh of (2, 1) is NO_SHARD in torch, and the two copies come to different models."""
    (clamped, first), (_, second) = processes.values(torch_l03, use_orig_params)
    assert clamped
    assert all(not torch.equal(first[name], second[name]) for name in first)


@both_exposures
def test_l03_every_shape_of_mesh_averages(processes: Outcomes, use_orig_params: bool) -> None:
    """L-03: over meshes of (2, 1) and of (1, 2), every rank comes to the unsharded model on the mean of the losses."""
    reference = seeded(mlp)
    expected = train_local(reference, sgd(reference.parameters()))
    for of_shapes in processes.values(ours_l03, use_orig_params):
        assert len(of_shapes) == 2
        for shape, found in of_shapes.items():
            assert_same_tensors(found, expected, f"mesh {shape}: parameter")


@both_exposures
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_l03_shard_groups_of_one_rank_average(use_orig_params: bool, strategy: str) -> None:
    """L-03: so does a pair of groups of which the shard group is the rank alone, with both hybrid strategies."""

    def rank(group: Collectives) -> dict[str, Tensor]:
        alone = [group.subgroup([number]) for number in range(RANKS)][group.rank]
        model = wrapped(
            seeded(mlp),
            nn.Linear,
            process_group=(alone, group),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
        train(model, sgd(model.parameters()), group.rank)
        return full_parameters(model)

    reference = seeded(mlp)
    expected = train_local(reference, sgd(reference.parameters()))
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
def test_l12_torch_lets_buffers_diverge(processes: Outcomes, use_orig_params: bool) -> None:
    """L-12: the statistics of a BatchNorm are each rank's own in torch, and there is no argument against it."""
    first, second = processes.values(torch_l12, use_orig_params)
    assert not torch.equal(first["running_mean"], second["running_mean"])
    assert not torch.equal(first["running_var"], second["running_var"])


def backward_from(
    at_start: dict[str, Tensor], step: int, at_end: list[dict[str, Tensor]], model: nn.Module, rank: int
) -> None:
    """A rank's backward pass from these buffers; what they are afterwards is appended to `at_end`."""
    model[1].load_state_dict(at_start, strict=False)
    square_loss(model, step, rank).backward()
    at_end.append(buffers(model))


@both_exposures
def test_l12_broadcast_buffers(use_orig_params: bool) -> None:
    """L-12: with broadcast_buffers, each training forward starts from rank 0's buffers, as DDP's does."""

    def rank(group: Collectives) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = wrapped(seeded(normed), nn.Linear, use_orig_params=use_orig_params, broadcast_buffers=True)
        train(model, sgd(model.parameters()), group.rank)
        return buffers(model), full_parameters(model)

    reference = seeded(normed)
    optimizer = sgd(reference.parameters())
    expected = [buffers(reference)]
    for step in range(STEPS):
        at_start, expected = expected[0], []
        mean_gradients(reference, functools.partial(backward_from, at_start, step, expected))
        optimizer.step()
    for (found, parameters), theirs in zip(on_two_ranks(rank), expected, strict=True):
        assert_same_tensors(found, theirs, "buffer")
        assert_same_tensors(parameters, parameters_of(reference), "parameter")


@both_exposures
def test_l12_buffers_are_each_ranks_own_without_it(use_orig_params: bool) -> None:
    """L-12: the default is FSDP1's: nothing is sent, and evaluation leaves the buffers alone in either case."""

    def rank(group: Collectives) -> list[Tensor]:
        found = []
        for broadcasting in (False, True):
            model = wrapped(seeded(normed), use_orig_params=use_orig_params, broadcast_buffers=broadcasting)
            model(batch(0, group.rank))
            model.eval()
            model(batch(1, group.rank))
            found.append(buffers(model)["running_mean"])
        return found

    for first, second in zip(*on_two_ranks(rank), strict=True):
        assert not torch.equal(first, second)
