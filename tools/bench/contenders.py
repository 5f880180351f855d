"""Who takes part: the floors, ours, and the peers."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import flatparam
import flatparam_comm
from flatparam_comm import Collectives, RecordingCollectives

from . import peers
from .training import Setting, Training, floor, optimizer_over, sharded_floor, unsharded

FLOOR: Final = "floor"
SHARDED_FLOOR: Final = "sharded floor"
FLOORS: Final = (FLOOR, SHARDED_FLOOR, "sharded floor, in parts")
"""Those who do not average gradients."""
SHARED_MEMORY: Final = "shared_memory"
"""What makes Collectives of shared memory out of a group, in `flatparam_comm`."""


@frozen
class Contender:
    """Somebody who trains. `missing` says why it cannot take part here, or is empty."""

    build: Callable[[Setting], Training]
    missing: Callable[[], str] = str

    @property
    def is_here(self) -> bool:
        """Whether it can take part."""
        return not self.missing()


def ours(setting: Setting, transport: str = "", **arguments: Any) -> Training:
    """flatparam's wrapper."""
    policy: Any = ModuleWrapPolicy({setting.workload.unit})
    precision = flatparam.MixedPrecision(torch.bfloat16, torch.bfloat16) if setting.bf16 else None
    model = flatparam.FullyShardedDataParallel(
        setting.model(),
        auto_wrap_policy=policy,
        mixed_precision=precision,
        **{"process_group": _over(setting, transport), **arguments},
    )
    return Training(model, optimizer_over(list(model.parameters())), setting.batch())


def in_place(setting: Setting, **arguments: Any) -> Training:
    """flatparam's `fully_shard`: the blocks, then the rest."""
    model = setting.model()
    if setting.bf16:
        arguments["mp_policy"] = flatparam.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for unit in [module for module in model.modules() if isinstance(module, setting.workload.unit)]:
        flatparam.fully_shard(unit, mesh=setting.group, **arguments)
    flatparam.fully_shard(model, mesh=setting.group, **arguments)
    return Training(model, optimizer_over(list(model.parameters())), setting.batch())


def fsdp1(setting: Setting, **arguments: Any) -> Training:
    """torch's first FSDP."""
    precision = torch_fsdp.MixedPrecision(torch.bfloat16, torch.bfloat16) if setting.bf16 else None
    model = torch_fsdp.FullyShardedDataParallel(
        setting.model(),
        process_group=setting.process_group,
        auto_wrap_policy=ModuleWrapPolicy({setting.workload.unit}),
        mixed_precision=precision,
        device_id=setting.device,
        **arguments,
    )
    return Training(model, optimizer_over(list(model.parameters())), setting.batch())


def fsdp2(setting: Setting, shard: Any = torch_fsdp.fully_shard, **arguments: Any) -> Training:
    """torch's second FSDP, or what `flatparam.install()` puts in the place of its function."""
    model: nn.Module = setting.model()
    options: dict[str, Any] = {"mesh": _mesh(setting), "reshard_after_forward": True, **arguments}
    if setting.bf16:
        options["mp_policy"] = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for unit in [module for module in model.modules() if isinstance(module, setting.workload.unit)]:
        shard(unit, **options)
    del options["reshard_after_forward"]  # the outermost module's default is not to
    shard(model, **options)
    return Training(model, optimizer_over(list(model.parameters())), setting.batch())


def ddp(setting: Setting) -> Training:
    """torch's DistributedDataParallel; in bf16 as the floor, with gradients that travel in bf16."""
    model = setting.model()
    model = model.bfloat16() if setting.bf16 else model
    return unsharded(DistributedDataParallel(model, process_group=setting.process_group), setting)


def _over(setting: Setting, transport: str) -> Collectives:
    if not transport:
        return setting.group
    group: Collectives = getattr(flatparam_comm, transport)(setting.group)
    return group if setting.ledger is None else RecordingCollectives(group, setting.ledger)


def _mesh(setting: Setting) -> DeviceMesh:
    if setting.process_group is None:
        return init_device_mesh("cpu", (dist.get_world_size(),))
    return DeviceMesh.from_group(setting.process_group, setting.device.type)


def _no_transport() -> str:
    there = hasattr(flatparam_comm, SHARED_MEMORY)
    return "" if there else f"this flatparam_comm has no {SHARED_MEMORY}"


def _not_installed(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"


def _ours(strategy: str, transport: str = "", **arguments: Any) -> Contender:
    build = partial(ours, transport=transport, sharding_strategy=flatparam.ShardingStrategy[strategy], **arguments)
    return Contender(build, _no_transport if transport else str)


def _fsdp1(strategy: str, **arguments: Any) -> Contender:
    return Contender(partial(fsdp1, sharding_strategy=torch_fsdp.ShardingStrategy[strategy], **arguments))


_ORIGINAL: Final[dict[str, Any]] = {"use_orig_params": True}

CONTENDERS: Final[dict[str, Contender]] = {
    FLOOR: Contender(floor),
    SHARDED_FLOOR: Contender(sharded_floor),
    FLOORS[2]: Contender(partial(sharded_floor, in_parts=True)),
    "flatparam": _ours("FULL_SHARD"),
    "flatparam, original": _ours("FULL_SHARD", **_ORIGINAL),
    "flatparam, shared memory": _ours("FULL_SHARD", SHARED_MEMORY),
    "flatparam, original, shared memory": _ours("FULL_SHARD", SHARED_MEMORY, **_ORIGINAL),
    "torch FSDP1": _fsdp1("FULL_SHARD"),
    "torch FSDP1, original": _fsdp1("FULL_SHARD", **_ORIGINAL),
    "torch FSDP2": Contender(fsdp2),
    "DeepSpeed ZeRO-3": Contender(peers.deepspeed_zero3, partial(_not_installed, "deepspeed")),
    "fairscale FSDP": Contender(peers.fairscale_fsdp, partial(_not_installed, "fairscale")),
    "flatparam SHARD_GRAD_OP": _ours("SHARD_GRAD_OP"),
    "flatparam SHARD_GRAD_OP, original": _ours("SHARD_GRAD_OP", **_ORIGINAL),
    "torch FSDP1 SHARD_GRAD_OP": _fsdp1("SHARD_GRAD_OP"),
    "torch FSDP1 SHARD_GRAD_OP, original": _fsdp1("SHARD_GRAD_OP", **_ORIGINAL),
    "flatparam NO_SHARD": _ours("NO_SHARD"),
    "flatparam NO_SHARD, original": _ours("NO_SHARD", **_ORIGINAL),
    "torch DDP": Contender(ddp),
}
