"""The same training by torch's FSDP1, in the same real processes over gloo: losses, gradients and parameters to the bit."""

import functools
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flatparam as ours
import flatparam.wrap
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

from .models import Batch, mlp, seeded
from .worlds import assert_same_state, inputs

pytestmark = pytest.mark.processes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SETTINGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"strategy": "FULL_SHARD"},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "param_dtype": {"precision": {"param_dtype": BF16}},
    "param_dtype, SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP", "precision": {"param_dtype": BF16}},
    "param_dtype, NO_SHARD": {"strategy": "NO_SHARD", "precision": {"param_dtype": BF16}},
    "reduce_dtype": {"precision": {"reduce_dtype": BF16}},
    "both dtypes": {"precision": {"param_dtype": BF16, "reduce_dtype": FP32}},
    "fp16": {"precision": {"param_dtype": FP16}},
    "cast_forward_inputs": {"precision": {"param_dtype": BF16, "cast_forward_inputs": True}},
    "buffer_dtype": {"model": Batch, "precision": {"buffer_dtype": torch.float64}},
    "BatchNorm": {"model": Batch, "precision": {"param_dtype": BF16}},
}


def wrapped(package: Any, setting: dict[str, Any], use_orig_params: bool) -> nn.Module:
    """The setting's model, wrapped by one of the two packages."""
    precision = setting.get("precision")
    return package.FullyShardedDataParallel(
        seeded(setting.get("model", mlp)),
        sharding_strategy=package.ShardingStrategy[setting.get("strategy", "FULL_SHARD")],
        auto_wrap_policy=package.wrap.ModuleWrapPolicy({nn.Linear}),
        mixed_precision=None if precision is None else package.MixedPrecision(**precision),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        **groups_of(package, setting),
    )


def groups_of(package: Any, setting: dict[str, Any]) -> dict[str, Any]:
    """The arguments that say which ranks share what; where we find them ourselves, torch has the mesh of two by two."""
    if not setting.get("strategy", "").lstrip("_").startswith("HYBRID"):
        return {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if setting.get("groups") == "pair":
        return {"process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}
    if setting.get("groups") == "nodes" and package is ours:
        return {}
    return {"device_mesh": mesh}


def trained(package: Any, setting: dict[str, Any], use_orig_params: bool, rank: int) -> dict[str, Tensor]:
    """Losses, gradient norms and parameters of training with accumulation and clipping, and an evaluation's output."""
    model = wrapped(package, setting, use_orig_params)
    precision = setting.get("precision", {})
    # In `no_sync` torch adds gradients up in the compute dtype, and we do in the dtype of the reduction.
    accumulates = "reduce_dtype" not in precision
    # In low precision torch lays originals out with other gaps, so that the norms of the shards round differently.
    max_norm = 1e6 if precision else 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = {}
    for step, x in enumerate(inputs(rank, 4)):
        if step == 1 and accumulates:
            with model.no_sync():
                model(x).float().square().mean().backward()
            continue
        loss = model(x).float().square().mean()
        loss.backward()
        found[f"norm {step}"] = model.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    with torch.no_grad():
        found["output"] = model.eval()(inputs(rank)[0])
    with package.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        found.update((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
        found.update((name, buffer.clone()) for name, buffer in model.named_buffers())
    return found


def both(group: Collectives, settings: dict[str, dict[str, Any]]) -> Any:
    """A rank's part of every setting and exposure: ours, and torch's."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # of this child process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            (name, original): [trained(package, setting, original, group.rank) for package in (ours, theirs)]
            for name, setting in settings.items()
            for original in (False, True)
        }


def assert_same_training(mine: dict[str, Tensor], other: dict[str, Tensor], *, norms: bool) -> None:
    """Everything is equal to the bit; but for the norms, where they are rounded in another order."""
    if not norms:
        for step in (name for name in other if name.startswith("norm")):
            torch.testing.assert_close(mine[step], other[step], rtol=1e-6, atol=0)
            mine = {**mine, step: other[step]}
    assert_same_state(mine, other)


@functools.cache
def of_two_ranks() -> Any:
    return run_processes(2, both, SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bits_of_torch(name: str, use_orig_params: bool) -> None:
    """S-030 to S-034, S-041, S-046 to S-051, S-070: on two ranks everything that both compute is equal to the bit."""
    for of_rank in of_two_ranks():
        mine, other = of_rank[name, use_orig_params]
        assert_same_training(mine, other, norms=not (use_orig_params and SETTINGS[name].get("precision")))


HYBRID: dict[str, dict[str, Any]] = {
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD"},
    "_HYBRID_SHARD_ZERO2": {"strategy": "_HYBRID_SHARD_ZERO2"},
    "pair": {"strategy": "HYBRID_SHARD", "groups": "pair"},
    "nodes": {"strategy": "HYBRID_SHARD", "groups": "nodes"},
    "HYBRID_SHARD, bf16": {"strategy": "HYBRID_SHARD", "precision": {"param_dtype": BF16}},
}


@functools.cache
def of_four_ranks() -> Any:
    return run_processes(4, both, HYBRID)


@pytest.mark.parametrize("name", HYBRID)
def test_the_bits_of_torch_on_a_mesh(name: str, use_orig_params: bool) -> None:
    """S-011, S-012, S-025, S-033: a mesh of two by two, a pair of groups and nodes of two train to the bits of torch."""
    for of_rank in of_four_ranks():
        mine, other = of_rank[name, use_orig_params]
        assert_same_training(mine, other, norms=not (use_orig_params and HYBRID[name].get("precision")))


def several_forwards(group: Collectives) -> Any:
    """For both strategies, with and without an unsynchronised backward before: our gradients, summoned, and torch's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            [gradients(package, strategy, accumulated, group.rank) for package in (ours, theirs)]
            for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
            for accumulated in (False, True)
        ]


def gradients(package: Any, strategy: str, accumulated: bool, rank: int) -> dict[str, Tensor]:
    model: Any = wrapped(package, {"strategy": strategy}, use_orig_params=True)
    first, second, third = inputs(rank)
    if accumulated:
        with model.no_sync():
            model(third).square().mean().backward()
    losses = [model(x).square().mean() for x in (first, second)]
    (losses[0] + losses[1]).backward()
    with package.FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_several_forwards() -> None:
    """S-042: the gradients of two forwards before one backward have the bits of torch's, which can do no more."""
    for of_rank in run_processes(2, several_forwards):
        for mine, other in of_rank:
            assert_same_state(mine, other)
