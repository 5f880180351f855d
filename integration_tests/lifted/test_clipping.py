"""Norms of gradients, and gradients that are looked at: rows L-35, L-36 and L-55 of the specification."""

from __future__ import annotations

import inspect
import math
import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from each_row import each_row
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from flatparam import ShardingStrategy
from flatparam_comm import Collectives, run_threads
from integration_tests.lifted.our_half import (
    FSDP,
    batch,
    blocks,
    full_gradients,
    give_gradients,
    gradient_of,
    hybrid,
    seeded,
    square_loss,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.runs import assert_same_tensors, gradients_of

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def torch_l36_groups(group: Collectives) -> list[float]:
    """The norm by torch where the root's group is smaller than another unit's, and the true one; equal inputs."""
    alone = [dist.new_group([rank]) for rank in range(2)][group.rank]
    model: Any = blocks()
    square_loss(model, 0, 0).backward()
    true = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    model = blocks()
    model[0] = fsdp1(model[0])
    model = fsdp1(model, process_group=alone)
    square_loss(model, 0, 0).backward()
    return [model.clip_grad_norm_(math.inf).item(), true.item()]


def torch_l36_signature(group: Collectives) -> list[str]:
    return list(inspect.signature(FullyShardedDataParallel.clip_grad_norm_).parameters)


def half_frozen() -> nn.Module:
    """Two layers in bf16, of which the second is frozen: each of two ranks holds one layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    model[1].requires_grad_(False)
    return model


def torch_l36_dtype(group: Collectives) -> torch.dtype:
    model = fsdp1(half_frozen(), use_orig_params=True)
    loss_of_bf16(model, group.rank).backward()
    return model.clip_grad_norm_(1.0).dtype


def loss_of_bf16(model: nn.Module, rank: int) -> Tensor:
    return model(batch(0, rank).bfloat16()).square().mean()


def torch_l35_clip(group: Collectives) -> None:
    model = fsdp1(nn.Sequential(fsdp1(nn.Linear(4, 4)), nn.Linear(4, 4)))
    model(torch.ones(1, 4)).sum().backward()
    model.module[0].clip_grad_norm_(1.0)


def torch_l55(group: Collectives) -> None:
    """Without the gather itself, in which gloo ends the process where ranks send different dtypes."""
    model = fsdp1(half_frozen(), use_orig_params=True)
    loss_of_bf16(model, group.rank).backward()
    summoned = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    with unittest.mock.patch.object(dist, GATHER), summoned:
        pass


def test_l36_torch_uses_the_roots_group_for_all(processes: Outcomes) -> None:
    """Torch's norm is wrong, and another on each rank, where a unit is sharded over more ranks than the root."""
    for found, true in processes.values(torch_l36_groups):
        assert abs(found - true) > 0.01 * true
    assert processes.values(torch_l36_groups)[0][0] != processes.values(torch_l36_groups)[1][0]


def test_l36_torch_knows_two_arguments(processes: Outcomes) -> None:
    """Torch's clip_grad_norm_ has neither error_if_nonfinite nor foreach."""
    assert processes.values(torch_l36_signature) == [["self", "max_norm", "norm_type"]] * 2


def test_l36_torch_returns_two_dtypes(processes: Outcomes) -> None:
    """Torch returns the norm in bf16 on the rank that has gradients, and in fp32 on the one that has none."""
    assert processes.values(torch_l36_dtype) == [torch.bfloat16, torch.float32]


def over_several_groups(group: Collectives) -> Any:
    """On four ranks: a root over all, a unit over pairs, a unit that is whole everywhere; after a backward pass."""
    model: Any = blocks()
    more = {"process_group": hybrid(group), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    model[0] = FSDP(model[0], **more)
    model[1] = FSDP(model[1], sharding_strategy=ShardingStrategy.NO_SHARD)
    model = FSDP(model)
    square_loss(model, 0, group.rank).backward()
    return model


def alone_on_four() -> nn.Module:
    model = blocks()
    give_gradients(model, [gradient_of(model, [0], rank) for rank in range(4)])
    return model


@pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated")
@each_row("norm_type", [2.0, 1.0, math.inf])
@each_row("foreach", [None, False, True])
def test_l36_every_unit_over_its_own_group(norm_type: float, foreach: bool | None) -> None:
    """Where three units have three groups, the norm is that of all gradients, on every rank, and all are clipped by it.

    The largest element is exact. Other norms are within 1e-6, as the parts of ranks are added in another order; so are
    the gradients beside those of the unsharded model, since four ranks are added in another order in each group.
    """

    def rank(group: Collectives) -> tuple[Tensor, Any, Any]:
        model = over_several_groups(group)
        before = full_gradients(model)
        norm = model.clip_grad_norm_(0.125, norm_type, foreach=foreach)
        return norm, before, full_gradients(model)

    alone = alone_on_four()
    norms = []
    for norm, before, after in run_threads(4, rank):
        norms.append(norm)
        torch.testing.assert_close(before, gradients_of(alone), rtol=1e-6, atol=1e-7)
        expected = torch.nn.utils.get_total_norm(before.values(), norm_type)
        torch.testing.assert_close(norm, expected, rtol=0 if norm_type == math.inf else 1e-6, atol=0)
        scale = torch.clamp(0.125 / (norm + 1e-6), max=1.0)
        assert scale < 1
        assert_same_tensors(after, {name: g * scale for name, g in before.items()}, "clipped gradient")
    assert all(torch.equal(norm, norms[0]) for norm in norms)


@each_row("original", [False, True])
def test_l36_a_norm_that_is_not_finite(original: bool) -> None:
    """error_if_nonfinite raises on every rank, names the rank and the parameter, and changes nothing."""

    def rank(group: Collectives) -> bool:
        model = FSDP(blocks(), use_orig_params=original)
        square_loss(model, 0, group.rank).backward()
        last = [parameter for parameter in model.parameters() if parameter.numel()][-1]
        if group.rank == 1:
            last.grad[-1] = math.inf
        before = last.grad.clone()
        told = r"norm of order 2.0 of the gradients is inf.* \(rank 1 has such a gradient of '[\w.]+bias'\); look for"
        with pytest.raises(RuntimeError, match=told):
            model.clip_grad_norm_(1.0, error_if_nonfinite=True)
        return torch.equal(last.grad, before)

    assert run_threads(2, rank) == [True, True]


@each_row("original", [False, True])
@each_row("inputs", [1, 4])
def test_l36_one_dtype_on_every_rank(inputs: int, original: bool) -> None:
    """The norm has one dtype and value on all ranks, also where one holds no element of any parameter."""

    def rank(group: Collectives) -> Tensor:
        model = FSDP(seeded(lambda: nn.Linear(inputs, 1, bias=False).bfloat16()), use_orig_params=original)
        model(torch.ones(1, inputs).bfloat16()).sum().backward()
        return model.clip_grad_norm_(10.0)

    for norm in run_threads(2, rank):
        assert torch.equal(norm, torch.tensor(inputs**0.5).bfloat16())


def test_l36_one_dtype_where_a_rank_has_dropped_its_gradients() -> None:
    """A rank whose gradients are all None returns the norm in the dtype of the others."""

    def rank(group: Collectives) -> torch.dtype:
        model = FSDP(bf16())
        loss_of_bf16(model, group.rank).backward()
        if group.rank == 1:
            model.zero_grad()
        return model.clip_grad_norm_(1.0).dtype

    assert run_threads(2, rank) == [torch.bfloat16] * 2


def test_l36_what_no_sync_holds_does_not_count() -> None:
    """Gradients that wait in no_sync are in no norm; after the pass that reduces them, all of their sum is."""

    def rank(group: Collectives) -> list[Tensor]:
        model = FSDP(blocks())
        with model.no_sync():
            square_loss(model, 0, group.rank).backward()
        waiting = model.clip_grad_norm_(math.inf, math.inf)
        square_loss(model, 1, group.rank).backward()
        return [waiting, model.clip_grad_norm_(math.inf, math.inf)]

    alone = blocks()
    give_gradients(alone, [gradient_of(alone, [0, 1], rank) for rank in range(2)])
    expected = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()], math.inf)
    for waiting, norm in run_threads(2, rank):
        assert waiting == 0
        assert torch.equal(norm, expected)


def test_l35_torch_clips_at_the_root_only(processes: Outcomes) -> None:
    """Torch refuses clip_grad_norm_ on a wrapper that is not the root."""
    processes.assert_raised(torch_l35_clip, "RuntimeError", "only be called on the root FSDP instance")


def test_l35_the_norm_of_one_unit() -> None:
    """A unit below the root clips its own gradients by their own norm, and leaves the others as they are."""

    def rank(group: Collectives) -> tuple[Tensor, Any]:
        model: Any = blocks()
        model[0] = FSDP(model[0])
        model = FSDP(model)
        square_loss(model, 0, group.rank).backward()
        return model.module[0].clip_grad_norm_(0.125, math.inf), full_gradients(model)

    alone: Any = blocks()
    give_gradients(alone, [gradient_of(alone, [0], rank) for rank in range(2)])
    expected = torch.nn.utils.clip_grad_norm_(alone[0].parameters(), 0.125, math.inf)
    assert expected > 0.125
    for norm, gradients in run_threads(2, rank):
        assert torch.equal(norm, expected)
        assert_same_tensors(gradients, gradients_of(alone), "gradient")


def test_l55_torch_makes_up_fp32_zeros(processes: Outcomes) -> None:
    """Torch stands in for bf16 gradients that a rank has not with fp32 zeros, and fails over their dtype there."""
    here, there = processes.reports(torch_l55)
    assert here is None
    assert (there.kind, "gradient with dtype 'float'" in there.message) == ("RuntimeError", True)


def bf16() -> nn.Module:
    """Two layers of one size in bf16: each of two ranks holds one of them."""
    return seeded(lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))).bfloat16())


@each_row("original", [False, True])
@each_row("dropped", [False, True])
def test_l55_gradients_that_one_rank_has_not(original: bool, dropped: bool) -> None:
    """Full bf16 gradients are shown on every rank; where one has dropped its own, zeros stand for them."""

    def rank(group: Collectives) -> Any:
        model = FSDP(bf16(), use_orig_params=original)
        loss_of_bf16(model, group.rank).backward()
        if dropped and group.rank == 1:
            model.zero_grad()
        return full_gradients(model)

    alone = bf16()
    of_ranks = []
    for number in range(2):
        alone.zero_grad()
        loss_of_bf16(alone, number).backward()
        of_ranks.append(gradients_of(alone))
    means = {name: gradient / 2 + of_ranks[1][name] / 2 for name, gradient in of_ranks[0].items()}
    if dropped:
        means["1.weight"].zero_()
        if original:  # rank 1 alone had it
            means["1.weight"] = None
    for gradients in run_threads(2, rank):
        assert_same_tensors(gradients, means, "gradient")
