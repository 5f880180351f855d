"""The enums and configuration objects of FSDP1's API: same names, same members, same fields.

They are ordinary, mutable dataclasses, because client libraries set their fields later.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flatparam.compat import LikeTorchs

__all__ = [
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
]


class ShardingStrategy(LikeTorchs):
    """Chooses the tensors that are sharded, the ranks that share them, and the time at which full parameters are freed.

    `docs/memory.md` has the bytes that each strategy takes and sends.
    """

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()


class BackwardPrefetch(LikeTorchs):
    """Chooses when the backward pass gathers the next unit: before it computes this unit's gradients, or after."""

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


class StateDictType(LikeTorchs):
    """The form of `state_dict()`: full tensors, this rank's flat shard, or sharded tensors."""

    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


class OptimStateKeyType(LikeTorchs):
    """Chooses the keys of an optimizer state dict: names of parameters, or numbers."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


@dataclass
class MixedPrecision:
    """The dtypes of computation, reduction and buffers; `None` keeps each as it is."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)


@dataclass
class CPUOffload:
    """Chooses whether shards stay in CPU memory while they are not gathered."""

    offload_params: bool = False


@dataclass
class StateDictConfig:
    """The fields that the configurations of all forms of model state have."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Save full tensors; with `rank0_only` the other ranks only get tensors that are not sharded."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Save this rank's flat shard."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Save sharded tensors: `DTensor`s if `_use_dtensor`, otherwise `ShardedTensor`s.

    With `dim_0_chunks` (not in FSDP1) a `ShardedTensor` has FSDP1's chunks, `tensor.chunk(world_size, dim=0)[rank]`,
    for which each unit is gathered; with False the parts that each rank owns anyway, so that nothing is moved. None is
    False, and True after `flatparam.install()`, since a program that is run unchanged may take the tensors apart.
    """

    _use_dtensor: bool = False
    dim_0_chunks: bool | None = None


@dataclass
class OptimStateDictConfig:
    """The fields that the configurations of all forms of optimizer state have."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Save full tensors; with `rank0_only` the other ranks get nothing."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Save this rank's flat shard."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Save sharded tensors: `DTensor`s if `_use_dtensor`; see `ShardedStateDictConfig`."""

    _use_dtensor: bool = False
    dim_0_chunks: bool | None = None


@dataclass
class StateDictSettings:
    """The state-dict form of a model with the configurations for model and optimizer."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig
