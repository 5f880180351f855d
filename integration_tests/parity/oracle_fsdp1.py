"""The other oracle: torch's FullyShardedDataParallel, on the same ranks and the same process group."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy

from flatparam_comm import Collectives
from integration_tests.parity.runs import Run
from integration_tests.parity.sharded import Setting, optimizer_of, replace
from integration_tests.parity.zoo import STEPS, Case, named


def wrap(case: Case, setting: Setting) -> FullyShardedDataParallel:
    """The case's model with the same units as ours, wrapped by torch."""
    prefetch = None if setting.backward_prefetch is None else BackwardPrefetch[setting.backward_prefetch]

    def wrapped(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module,
            sharding_strategy=ShardingStrategy[setting.strategy],
            use_orig_params=setting.use_orig_params,
            forward_prefetch=setting.forward_prefetch,
            backward_prefetch=prefetch,
            device_id=torch.device("cpu"),
        )

    model = case.build()
    for path in case.units:
        replace(model, path, wrapped)
    return wrapped(model)


def train(group: Collectives, name: str, setting: Setting) -> Run:
    """This rank's losses and, after each step, the full parameters; gradients are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and says so at every turn
        return _train(group, named(name), setting)


def _train(group: Collectives, case: Case, setting: Setting) -> Run:
    model = wrap(case, setting)
    optimizer = optimizer_of(model, setting)
    run = Run([], [], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = case.loss(model, step, group.rank)
        loss.backward()
        optimizer.step()
        run.losses.append([loss.detach()])
        run.gradients.append({})
        run.parameters.append(full_parameters(model))
    return run


def full_parameters(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """A copy of every parameter of the model, by the names that the unwrapped model has."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }
