"""The contents of a flat parameter's shard, as plain data for checkpoints and diagnostics."""

from __future__ import annotations

from typing import final

import attrs

from flatparam_core.geometry.layout import FlatLayout

__all__ = ["FlatParamShardMetadata", "shard_metadata"]


@final
@attrs.frozen
class FlatParamShardMetadata:
    """The parameters of which a shard holds any element, in order.

    `param_offsets` are half-open `[start, stop)` intervals in elements of each parameter, in its memory order.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[tuple[int, ...], ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


def shard_metadata(layout: FlatLayout, rank: int) -> FlatParamShardMetadata:
    """Describe the shard that `rank` holds of `layout`."""
    held = [fragment for fragment in layout.fragments(rank) if fragment.in_param]
    specs = [layout.slots[fragment.index].spec for fragment in held]
    return FlatParamShardMetadata(
        tuple(spec.fqn for spec in specs),
        tuple(spec.shape for spec in specs),
        tuple(spec.stride for spec in specs),
        tuple(spec.numel for spec in specs),
        tuple((fragment.in_param.start, fragment.in_param.stop) for fragment in held),
    )
