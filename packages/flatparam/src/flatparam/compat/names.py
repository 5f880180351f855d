"""FSDP1's names, each with the module of ours that has it, so that one table says what programs will find."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import attrs
from typing_extensions import final

__all__ = ["FSDP", "STATE_FUNCTIONS", "Name", "fsdp1_names", "lacking"]

FSDP: Final = "torch.distributed.fsdp"
STATE_FUNCTIONS: Final = "torch.distributed.checkpoint.state_dict"

PUBLIC: Final[Mapping[str, str]] = {
    FSDP: "flatparam",
    f"{FSDP}.fully_sharded_data_parallel": "flatparam.fully_sharded_data_parallel",
    f"{FSDP}.api": "flatparam.api",
    f"{FSDP}.wrap": "flatparam.wrap",
    f"{FSDP}.sharded_grad_scaler": "flatparam.sharded_grad_scaler",
}
"""Torch's modules whose public names are ours, and our modules that have them."""

_HARVESTED: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    FSDP: ("flatparam", ("FlatParameter",)),
    f"{FSDP}.fully_sharded_data_parallel": (
        "flatparam.fully_sharded_data_parallel",
        (
            "BackwardPrefetch",
            "CPUOffload",
            "CustomPolicy",
            "FlatParameter",
            "FullOptimStateDictConfig",
            "FullStateDictConfig",
            "LocalOptimStateDictConfig",
            "LocalStateDictConfig",
            "MixedPrecision",
            "ModuleWrapPolicy",
            "OptimStateDictConfig",
            "ShardedOptimStateDictConfig",
            "ShardedStateDictConfig",
            "ShardingStrategy",
            "StateDictConfig",
            "StateDictSettings",
            "StateDictType",
        ),
    ),
    f"{FSDP}.sharded_grad_scaler": ("flatparam.sharded_grad_scaler", ("ShardedGradScaler",)),
    f"{FSDP}.wrap": (
        "flatparam.wrap",
        (
            "_ConfigAutoWrap",
            "_Policy",
            "_module_wrap_policy",
            "_or_policy",
            "_recursive_wrap",
            "_wrap_module_cls_individually",
        ),
    ),
    f"{FSDP}._debug_utils": (
        "flatparam._debug_utils",
        ("SimpleProfiler", "_get_sharded_module_tree_with_module_name_to_fqns"),
    ),
    f"{FSDP}._fsdp_extensions": (
        "flatparam._fsdp_extensions",
        ("FSDPExtensions", "_set_fsdp_extensions"),
    ),
    f"{FSDP}._trace_utils": (
        "flatparam._trace_utils",
        ("TracingConfig", "_ExecOrderTracer", "_ExecutionInfo", "_ParamUsageInfo"),
    ),
    f"{FSDP}._common_utils": (
        "flatparam.private._common_utils",
        (
            "FSDP_FLATTENED",
            "FSDP_PREFIX",
            "FSDP_WRAPPED_MODULE",
            "HandleTrainingState",
            "TrainingState",
            "_get_module_fsdp_state",
            "_get_module_fsdp_state_if_fully_sharded_module",
            "_has_fsdp_params",
            "_is_fsdp_flattened",
            "_module_handle",
            "_set_fsdp_flattened",
            "clean_tensor_name",
        ),
    ),
    f"{FSDP}._flat_param": (
        "flatparam.private._flat_param",
        (
            "FlatParamHandle",
            "FlatParamShardMetadata",
            "FlatParameter",
            "ParamInfo",
            "SharedParamInfo",
            "_ShardParamInfo",
        ),
    ),
    f"{FSDP}._init_utils": ("flatparam.private._init_utils", ("HYBRID_SHARDING_STRATEGIES",)),
    f"{FSDP}._runtime_utils": (
        "flatparam.private._runtime_utils",
        (
            "_get_fsdp_root_states",
            "_is_fsdp_root",
            "_lazy_init",
            "_post_backward_final_callback",
            "_reshard",
            "_unshard",
        ),
    ),
    f"{FSDP}._traversal_utils": (
        "flatparam.private._traversal_utils",
        ("_get_fsdp_handles", "_get_fsdp_states", "_get_fsdp_states_with_modules"),
    ),
    STATE_FUNCTIONS: (
        "flatparam.checkpoint.state_dict",
        (
            "get_model_state_dict",
            "get_optimizer_state_dict",
            "get_state_dict",
            "set_model_state_dict",
            "set_optimizer_state_dict",
            "set_state_dict",
        ),
    ),
}
"""By torch's module: ours, and the names that programs take from there although they are not in an `__all__`."""


@final
@attrs.frozen
class Name:
    """A name of FSDP1's in a module of torch's, and the module of ours that has one for it."""

    module: str
    name: str
    home: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def ours(self) -> Any:
        """What the name stands for in our module.

        Raises:
            AttributeError: if our module lacks it.
        """
        return getattr(importlib.import_module(self.home), self.name)


def fsdp1_names() -> list[Name]:
    """FSDP1's names in the torch that is installed: those of each public module, and those that programs reach for.

    The names of FSDP2, which share torch's package, are not among them.
    """
    of_fsdp2 = vars(importlib.import_module(f"{FSDP}._fully_shard"))
    found: dict[tuple[str, str], Name] = {}
    for module, home in PUBLIC.items():
        for name in getattr(importlib.import_module(module), "__all__", ()):
            if name not in of_fsdp2:
                found[module, name] = Name(module, name, home)
    for module, (home, names) in _HARVESTED.items():
        torchs = _module_or_none(module)
        for name in names:
            # A later torch may have moved or dropped what is private.
            if torchs is not None and hasattr(torchs, name):
                found[module, name] = Name(module, name, home)
    return list(found.values())


def lacking() -> list[str]:
    """Those of `fsdp1_names` that our modules lack."""
    return [str(name) for name in fsdp1_names() if not hasattr(importlib.import_module(name.home), name.name)]


def _module_or_none(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
