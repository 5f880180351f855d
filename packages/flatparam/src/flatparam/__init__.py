"""flatparam: a drop-in successor of `torch.distributed.fsdp.FullyShardedDataParallel`.

The names that it exports are imported on first use, so that the command line can answer without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    from flatparam.compat.installing import Installation, install, uninstall
    from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel
    from flatparam.in_place.applying import fully_shard
    from flatparam.in_place.module import FSDPModule, register_fsdp_forward_method
    from flatparam.in_place.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from flatparam.observing.recording import trace
    from flatparam.planning.errors import PlanError
    from flatparam.planning.making import plan
    from flatparam.planning.plan import Plan
    from flatparam.pretrained.loading import PretrainedReport, load_pretrained
    from flatparam.spread import clip_grad_norm_
    from flatparam.wrapper.training_state import UnshardHandle
    from flatparam_core import FlatParameter
    from flatparam_runtime import allow_shards
    from flatparam_state import (
        Checkpointer,
        CheckpointError,
        GroupChannel,
        Loaded,
        Mailbox,
        Published,
        Publisher,
        PublishError,
        Receiver,
        ShardedEMA,
        Slicing,
        offload,
        onload,
        publish,
    )

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
    "flatparam.compat.installing": ("Installation", "install", "uninstall"),
    "flatparam.fully_sharded_data_parallel": ("FullyShardedDataParallel",),
    "flatparam.in_place.applying": ("fully_shard",),
    "flatparam.spread": ("clip_grad_norm_",),
    "flatparam.in_place.module": ("FSDPModule", "register_fsdp_forward_method"),
    "flatparam.in_place.policies": ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"),
    "flatparam.observing.recording": ("trace",),
    "flatparam.planning.errors": ("PlanError",),
    "flatparam.planning.making": ("plan",),
    "flatparam.planning.plan": ("Plan",),
    "flatparam.pretrained.loading": ("PretrainedReport", "load_pretrained"),
    "flatparam.wrapper.training_state": ("UnshardHandle",),
    "flatparam_core": ("FlatParameter",),
    "flatparam_runtime": ("allow_shards",),
    "flatparam_state": (
        "Checkpointer",
        "CheckpointError",
        "GroupChannel",
        "Loaded",
        "Mailbox",
        "PublishError",
        "Published",
        "Publisher",
        "Receiver",
        "ShardedEMA",
        "Slicing",
        "offload",
        "onload",
        "publish",
    ),
}
"""The modules that have the names which this package exports."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name that this package exports, or a module of the package."""
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        try:
            value = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
