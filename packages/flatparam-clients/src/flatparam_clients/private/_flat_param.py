"""FSDP1's module of flat parameters: its names."""

from __future__ import annotations

from flatparam_clients.flat_parameter_names import OfModule as ParamInfo
from flatparam_clients.flat_parameter_names import OfShard as _ShardParamInfo
from flatparam_clients.flat_parameter_names import SharedOfModule as SharedParamInfo
from flatparam_clients.handle_view import HandleView as FlatParamHandle
from flatparam_core import FlatParameter, FlatParamShardMetadata

__all__ = [
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "ParamInfo",
    "SharedParamInfo",
    "_ShardParamInfo",
]
