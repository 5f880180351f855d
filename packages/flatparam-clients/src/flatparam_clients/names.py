"""FSDP1's names, each with the module of ours that has it, and the modules that hold what a name stood for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final, final

import attrs

from flatparam.compat import Patch

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

FACADES: Final[Mapping[str, str]] = {
    f"{FSDP}.sharded_grad_scaler": "flatparam.sharded_grad_scaler",
    f"{FSDP}._debug_utils": "flatparam_clients.private._debug_utils",
    f"{FSDP}._fsdp_extensions": "flatparam_clients.private._fsdp_extensions",
    f"{FSDP}._trace_utils": "flatparam_clients.private._trace_utils",
    f"{FSDP}._common_utils": "flatparam_clients.private._common_utils",
    f"{FSDP}._flat_param": "flatparam_clients.private._flat_param",
    f"{FSDP}._init_utils": "flatparam_clients.private._init_utils",
    f"{FSDP}._runtime_utils": "flatparam_clients.private._runtime_utils",
    f"{FSDP}._traversal_utils": "flatparam_clients.private._traversal_utils",
    STATE_FUNCTIONS: "flatparam.checkpoint.state_dict",
    "torch.distributed.checkpoint.state_dict_saver": "flatparam.checkpoint",
    "torch.distributed.algorithms._comm_hooks": "flatparam.algorithms._comm_hooks",
    "torch.distributed.algorithms._comm_hooks.default_hooks": "flatparam.algorithms._comm_hooks.default_hooks",
}
"""Torch's modules without an `__all__` that is FSDP1's, and our modules, whose `__all__` says what programs take."""

ALSO_TAKEN: Final[Mapping[str, Sequence[str]]] = {
    FSDP: ("FlatParameter",),
    f"{FSDP}.fully_sharded_data_parallel": (
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
    f"{FSDP}.wrap": (
        "_ConfigAutoWrap",
        "_Policy",
        "_module_wrap_policy",
        "_or_policy",
        "_recursive_wrap",
        "_wrap_module_cls_individually",
    ),
}
"""The names that programs take from the modules of `PUBLIC` although they are not in an `__all__` there."""


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
        """The object that the name stands for in our module.

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
    taken = {(PUBLIC[module], module): names for module, names in ALSO_TAKEN.items()}
    taken |= {(home, module): importlib.import_module(home).__all__ for module, home in FACADES.items()}
    for (home, module), names in taken.items():
        torchs = _module_or_none(module)
        for name in names:
            # A later torch may have moved or dropped what is private.
            if torchs is not None and hasattr(torchs, name):
                found[module, name] = Name(module, name, home)
    return list(found.values())


def lacking() -> list[str]:
    """Return those of `fsdp1_names` that our modules lack."""
    return [str(name) for name in fsdp1_names() if not hasattr(importlib.import_module(name.home), name.name)]


def _module_or_none(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


_LEFT_ALONE: Final = (
    # The implementation of FSDP1 and of FSDP2.
    f"{FSDP}._",
    "torch.distributed._composable",
    # The compiler, which has rules of its own for them.
    "torch._dynamo",
    "torch._inductor",
    "torch.testing",
    # Our own modules hold what they need of torch on purpose.
    "flatparam",
    "flatparam_clients",
)
"""The modules, and what is in them, that keep torch's objects."""


def patches_of_holders(ours_for: Mapping[int, tuple[Any, Any]]) -> Iterator[Patch]:
    """Yield a patch for each attribute of a module in memory that is one of torch's objects.

    Args:
        ours_for: by the `id` of each of torch's objects, the object and ours.
    """
    for name, module in list(sys.modules.items()):
        # Programs put other things among the modules, too.
        if _is_left_alone(name) or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            theirs, ours = ours_for.get(id(value), (None, None))
            if theirs is not None and theirs is value:
                yield Patch(module, attribute, ours)


def _is_left_alone(name: str) -> bool:
    return any(
        name.startswith(prefix) if prefix.endswith("_") else name == prefix or name.startswith(f"{prefix}.")
        for prefix in _LEFT_ALONE
    )
