"""Who takes part: the benchmark's contenders, on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch.distributed.fsdp as torch_fsdp
from bench.contenders import Contender, fsdp1, fsdp2, in_place, ours
from bench.training import Setting, Training, floor
from bench.workloads import Workload

import flatparam
from flatparam_comm import Topology

from .place import Place, told

PLAIN: Final = "plain model"
REFERENCE: Final = "torch FSDP1"
SHARDED_ALONE: Final = "flatparam, sharded over one rank"
"""In a world of one flatparam and FSDP1 shard nothing. So does this contender all the same, through the backend."""


def sharded_alone(setting: Setting, **arguments: Any) -> Training:
    """flatparam's wrapper, which takes a topology as it is, however few ranks it has."""
    return ours(setting, process_group=Topology(setting.group), **arguments)


_ORIGINAL: Final[dict[str, Any]] = {"use_orig_params": True}


def sharding(ranks: int) -> dict[str, Contender]:
    """Those who shard everything, in flat and in original parameters."""
    alone = {SHARDED_ALONE: Contender(sharded_alone)} if ranks == 1 else {}
    return {
        "flatparam": Contender(ours),
        "flatparam, original": Contender(partial(ours, **_ORIGINAL)),
        "flatparam, fully_shard": Contender(in_place),
        **alone,
        REFERENCE: Contender(fsdp1),
        "torch FSDP1, original": Contender(partial(fsdp1, **_ORIGINAL)),
        "torch FSDP2": Contender(fsdp2),
    }


def with_plain(ranks: int) -> dict[str, Contender]:
    """The model as it is, which has nothing to do with other ranks, and those who shard it."""
    return {PLAIN: Contender(floor), **sharding(ranks)}


def with_kept(ranks: int) -> dict[str, Contender]:
    """Those who shard everything, and those who keep full parameters."""
    return {**sharding(ranks), **keeping(ranks)}


def summing() -> dict[str, Contender]:
    """Those who shard nothing and sum gradients."""
    no_shard = flatparam.ShardingStrategy.NO_SHARD, torch_fsdp.ShardingStrategy.NO_SHARD
    return {
        "flatparam, NO_SHARD": Contender(partial(ours, sharding_strategy=no_shard[0])),
        "torch FSDP1, NO_SHARD": Contender(partial(fsdp1, sharding_strategy=no_shard[1])),
    }


def keeping(ranks: int) -> dict[str, Contender]:
    """Those who keep full parameters from the forward pass for the backward pass."""
    kept = flatparam.ShardingStrategy.SHARD_GRAD_OP
    if ranks == 1:
        return {f"{SHARDED_ALONE}, SHARD_GRAD_OP": Contender(partial(sharded_alone, sharding_strategy=kept))}
    of_torch = torch_fsdp.ShardingStrategy.SHARD_GRAD_OP
    return {
        "flatparam, SHARD_GRAD_OP": Contender(partial(ours, sharding_strategy=kept)),
        "torch FSDP1, SHARD_GRAD_OP": Contender(partial(fsdp1, sharding_strategy=of_torch)),
        "torch FSDP2, SHARD_GRAD_OP": Contender(partial(fsdp2, reshard_after_forward=False)),
    }


def exact(ranks: int) -> dict[str, Contender]:
    """The one that adds gradients exactly."""
    build = sharded_alone if ranks == 1 else ours
    return {"flatparam, exact sums": Contender(partial(build, reduction="exact"))}


def offloading(ranks: int) -> dict[str, Contender]:
    """Those whose shards, gradients and optimizer are on the host."""
    flat = sharded_alone if ranks == 1 else ours
    return {
        "flatparam, offload": Contender(partial(flat, cpu_offload=flatparam.CPUOffload(True))),
        "torch FSDP1, offload": Contender(partial(fsdp1, cpu_offload=torch_fsdp.CPUOffload(True))),
        "torch FSDP2, offload": Contender(partial(fsdp2, offload_policy=torch_fsdp.CPUOffloadPolicy())),
    }


def full_step(training: Training) -> None:
    """Forward, backward, the optimizer; the host does not wait for the loss."""
    training.backward(training.forward())
    training.update()


def passes(training: Training) -> None:
    """The same without the optimizer."""
    training.backward(training.forward())
    training.optimizer.zero_grad()


Step = Callable[[Training], None]


def attempt(
    place: Place, contender: Contender, workload: Workload, *, bf16: bool = False, step: Step = full_step
) -> Training | str:
    """The contender after three steps, or why it cannot take part: what is raised is raised on every rank alike."""
    try:
        training = contender.build(place.setting(workload, bf16=bf16))
        for _ in range(3):  # lazy state, the order of execution, and the first step that knows it
            step(training)
        place.synchronise()
    except Exception as error:  # whatever it is, it goes into the results, and the others go on
        return told(error)
    return training
