"""The positions of parameters in a flat parameter: integers and no memory."""

from flatparam_core.geometry.layout import FlatLayout, FlatParamShardMetadata, Fragment, Slot, shard_metadata
from flatparam_core.geometry.planning import Location, Move, Place, plan_layouts, replan
from flatparam_core.geometry.shard_pieces import ShardPieces, Unflattened, fragment_shape, pack_parameter, pack_shard
from flatparam_core.geometry.spans import Box, Span
from flatparam_core.geometry.specs import (
    CHUNK,
    ELEMENT,
    ROW,
    WHOLE,
    LayoutRule,
    ParamSpec,
    block_of,
    contiguous_stride,
    memory_view,
)

__all__ = [
    "Box",
    "CHUNK",
    "ELEMENT",
    "FlatLayout",
    "FlatParamShardMetadata",
    "Fragment",
    "LayoutRule",
    "Location",
    "Move",
    "ParamSpec",
    "Place",
    "ROW",
    "ShardPieces",
    "Slot",
    "Span",
    "Unflattened",
    "WHOLE",
    "block_of",
    "contiguous_stride",
    "fragment_shape",
    "memory_view",
    "pack_parameter",
    "pack_shard",
    "plan_layouts",
    "replan",
    "shard_metadata",
]
