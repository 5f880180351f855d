"""A model trained in one process, sharded by ours, and sharded by torch's FSDP1: all on the same batches."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import wrap as torch_wrap

import flatparam
from flatparam import FullyShardedDataParallel, ShardingStrategy
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from integration_tests.models.described import BLOCKS, STEPS, Model
from integration_tests.parity.local import reduce_by_rule
from integration_tests.parity.oracle_fsdp1 import full_parameters
from integration_tests.parity.runs import Run, gradients_of, parameters_of
from integration_tests.parity.sharded import RankRun, held_gradients, held_parameters

RANKS = 2


@attrs.frozen
class Setting:
    """How a model is wrapped."""

    strategy: str = "FULL_SHARD"
    original: bool = False
    mixed: bool = False
    checkpointing: bool = False
    units: str = BLOCKS

    def evolve(self, **changes: Any) -> Setting:
        """The same but for `changes`."""
        return attrs.evolve(self, **changes)

    def __str__(self) -> str:
        words = (
            self.strategy,
            "original" if self.original else "flat",
            "bf16" if self.mixed else "fp32",
            "checkpointing" if self.checkpointing else "plain",
            self.units,
        )
        return "-".join(words)


PRECISION = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over what `parameters()` lists."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def built(model: Model, checkpointing: bool, seed: int = 0) -> nn.Module:
    """The model, unsharded."""
    module = model.build(seed)
    if checkpointing:
        model.checkpoint(module)
    return module


def wrapped(
    model: Model, setting: Setting, group: Any = None, seed: int = 0, **arguments: Any
) -> FullyShardedDataParallel:
    """The model sharded by ours."""
    module = built(model, setting.checkpointing, seed)
    return FullyShardedDataParallel(
        module,
        group,
        ShardingStrategy[setting.strategy],
        auto_wrap_policy=ModuleWrapPolicy(model.classes(module, setting.units)),
        mixed_precision=flatparam.MixedPrecision(**PRECISION) if setting.mixed else None,
        use_orig_params=setting.original,
        **arguments,
    )


def train(group: Collectives, model: Model, setting: Setting) -> RankRun:
    """One rank's part of training with ours."""
    sharded = wrapped(model, setting, group)
    optimizer = adamw(sharded)
    run = RankRun([], [], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(sharded, step, group.rank)
        loss.backward()
        run.losses.append(loss.detach())
        run.gradients.append(held_gradients(sharded))
        optimizer.step()
        run.parameters.append(held_parameters(sharded))
    return run


@functools.lru_cache(maxsize=2)
def train_local(model: Model, checkpointing: bool) -> Run:
    """Each rank's gradients computed by themselves in one process, then reduced by the documented rule."""
    local = built(model, checkpointing)
    optimizer = adamw(local)
    run = Run([], [], [])
    with torch.random.fork_rng(devices=[]):
        for step in range(STEPS):
            losses, of_ranks = [], []
            for rank in range(RANKS):
                optimizer.zero_grad()
                loss = model.loss(local, step, rank)
                loss.backward()
                losses.append(loss.detach())
                of_ranks.append(gradients_of(local))
            for name, parameter in local.named_parameters():
                parameter.grad = reduce_by_rule([gradients[name] for gradients in of_ranks])
            run.losses.append(losses)
            run.gradients.append(gradients_of(local))
            optimizer.step()
            run.parameters.append(parameters_of(local))
    return run


def train_torch(group: Collectives, model: Model, settings: list[Setting]) -> dict[Setting, Run]:
    """One rank's part of training with torch's FSDP1: losses, and the full parameters at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and says so at every turn
        return {setting: _train_torch(group, model, setting) for setting in settings}


def _train_torch(group: Collectives, model: Model, setting: Setting) -> Run:
    module = built(model, setting.checkpointing)
    sharded = torch_fsdp.FullyShardedDataParallel(
        module,
        sharding_strategy=torch_fsdp.ShardingStrategy[setting.strategy],
        auto_wrap_policy=torch_wrap.ModuleWrapPolicy(model.classes(module, setting.units, in_torch=True)),
        mixed_precision=torch_fsdp.MixedPrecision(**PRECISION) if setting.mixed else None,
        use_orig_params=setting.original,
        device_id=torch.device("cpu"),
    )
    optimizer = adamw(sharded)
    run = Run([], [], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(sharded, step, group.rank)
        loss.backward()
        run.losses.append([loss.detach()])
        optimizer.step()
    run.parameters.append(full_parameters(sharded))
    return run
