"""flatparam: a drop-in successor of `torch.distributed.fsdp.FullyShardedDataParallel`.

The names that it exports are imported on first use, so that the command line can answer without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatparam.addons import find_moved_modules, lazily

if TYPE_CHECKING:
    from flatparam.api import (
        BackwardPrefetch,
        CPUOffload,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )
    from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel
    from flatparam.in_place.applying import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from flatparam.in_place.module import FSDPModule, register_fsdp_forward_method
    from flatparam.spread import clip_grad_norm_
    from flatparam.wrapper.training import UnshardHandle
    from flatparam_checkpoint import Checkpointer, Loaded, PretrainedReport, load_pretrained
    from flatparam_clients import Installation, install, uninstall
    from flatparam_core import FlatParameter
    from flatparam_files import CheckpointError
    from flatparam_optim import allow_shards
    from flatparam_plan import Plan, PlanError, plan, trace
    from flatparam_publish import GroupChannel, Mailbox, Published, Publisher, PublishError, Receiver, Slicing, publish
    from flatparam_state import ShardedEMA, offload, onload

__version__ = "0.1.0"

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "Checkpointer",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GroupChannel",
    "Installation",
    "Loaded",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "Mailbox",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Plan",
    "PlanError",
    "PretrainedReport",
    "PublishError",
    "Published",
    "Publisher",
    "Receiver",
    "ShardedEMA",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "Slicing",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "allow_shards",
    "clip_grad_norm_",
    "fully_shard",
    "install",
    "load_pretrained",
    "offload",
    "onload",
    "plan",
    "publish",
    "register_fsdp_forward_method",
    "trace",
    "uninstall",
]

_HOMES = {
    "flatparam.api": (
        "BackwardPrefetch",
        "CPUOffload",
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "LocalOptimStateDictConfig",
        "LocalStateDictConfig",
        "MixedPrecision",
        "OptimStateDictConfig",
        "OptimStateKeyType",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
        "ShardingStrategy",
        "StateDictConfig",
        "StateDictSettings",
        "StateDictType",
    ),
    "flatparam.fully_sharded_data_parallel": ("FullyShardedDataParallel",),
    "flatparam.in_place.applying": ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"),
    "flatparam.spread": ("clip_grad_norm_",),
    "flatparam.in_place.module": ("FSDPModule", "register_fsdp_forward_method"),
    "flatparam.wrapper.training": ("UnshardHandle",),
    "flatparam_checkpoint": ("Checkpointer", "Loaded", "PretrainedReport", "load_pretrained"),
    "flatparam_clients": ("Installation", "install", "uninstall"),
    "flatparam_core": ("FlatParameter",),
    "flatparam_files": ("CheckpointError",),
    "flatparam_plan": ("Plan", "PlanError", "plan", "trace"),
    "flatparam_publish": (
        "GroupChannel",
        "Mailbox",
        "Published",
        "Publisher",
        "PublishError",
        "Receiver",
        "Slicing",
        "publish",
    ),
    "flatparam_optim": ("allow_shards",),
    "flatparam_state": ("ShardedEMA", "offload", "onload"),
}
"""The modules that have the names which this package exports."""
__getattr__ = lazily(__name__, _HOMES)
find_moved_modules()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
