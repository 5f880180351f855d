"""FSDP1's module of flat parameters: its names."""

from __future__ import annotations

from flatparam_clients.flat_parameter import OfModule as ParamInfo
from flatparam_clients.flat_parameter import OfShard as _ShardParamInfo
from flatparam_clients.flat_parameter import SharedOfModule as SharedParamInfo
from flatparam_clients.handle import HandleView as FlatParamHandle
from flatparam_core import FlatParameter, FlatParamShardMetadata

__all__ = [
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "ParamInfo",
    "SharedParamInfo",
    "_ShardParamInfo",
]
