"""Sharded states of fairseq2, whose files have this rank's part of each tensor, and no word about which part it is.

It asks a `ShardedTensor` for its only part, and puts the parts of all ranks together along dimension 0. So it needs
FSDP1's chunks. By default a state here has the parts that each rank owns anyway: up to three boxes of a matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from flatparam.api import ShardedOptimStateDictConfig, ShardedStateDictConfig
from flatparam.compat.patching import Patch

__all__ = ["patches_of_local_states"]

_HOME: Final = "fairseq2.nn.fsdp.fsdp1"


@dataclass
class _Chunked(ShardedStateDictConfig):
    """A configuration that asks for FSDP1's chunks, unless it is told otherwise."""

    dim_0_chunks: bool = True


@dataclass
class _ChunkedOptim(ShardedOptimStateDictConfig):
    """The same for optimizer states."""

    dim_0_chunks: bool = True


_CHUNKED: Final[dict[type, type]] = {
    ShardedStateDictConfig: _Chunked,
    ShardedOptimStateDictConfig: _ChunkedOptim,
}


def patches_of_local_states() -> Iterator[Patch]:
    """The patches of the configurations that fairseq2 makes, if its module is imported and has ours."""
    home: Any = sys.modules.get(_HOME)
    for ours, chunked in _CHUNKED.items():
        if home is not None and vars(home).get(ours.__name__) is ours:
            yield Patch(home, ours.__name__, chunked)
