"""Checksums of full tensors that every rank is given: each keeps only its own part, so they have to be the same."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import xxhash
from torch import Tensor

from flatparam_runtime import Threshold, Topology
from flatparam_state.forms.deferred import is_ordinary

__all__ = ["UNCOMPARED", "checksums", "digest", "refused_anywhere"]

UNCOMPARED: Final = 0
"""Stands for the checksum of a value that ranks do not compare, such as a part of a sharded tensor."""
_ADVICE: Final = "load the same state on every rank"
_MOST_TOLD: Final = 20
"""How many misfits a rank tells the others of."""
CHECKED_NUMEL: Final = Threshold(
    "state.checked_numel",
    2**16,
    "Ranks that load full tensors compare so many elements of each, evenly spread if it has more.",
)


def checksums(values: Mapping[str, Any]) -> dict[str, int]:
    """By name, a checksum of each tensor in `values`; `UNCOMPARED` of what is no ordinary tensor with values."""
    return {
        name: _checksum(value) if is_ordinary(value) and not value.is_meta else UNCOMPARED
        for name, value in values.items()
    }


def digest(found: Mapping[str, int]) -> int:
    """One number for all of these checksums, the same in every process."""
    number: int = xxhash.xxh3_64_intdigest(repr(sorted(found.items())).encode())
    return number


def _checksum(value: Tensor) -> int:
    step = math.ceil(value.numel() / CHECKED_NUMEL.value) or 1
    some = value.detach().resolve_conj().resolve_neg().reshape(-1)[::step].cpu().contiguous()
    found: int = xxhash.xxh3_64_intdigest(ctypes.string_at(some.data_ptr(), some.nbytes))
    return found


def refused_anywhere(
    topology: Topology, refused: list[str], loaded: Mapping[str, int] | None = None
) -> list[str]:
    """The misfits of every rank, each with its rank, so that no rank changes anything if one of them has a misfit.

    Args:
        topology: the ranks; every one of them calls it, with its own list.
        refused: what does not fit on this rank; the others hear of the first few.
        loaded: checksums of what is to be the same on all ranks, by name.
    """
    loaded = loaded or {}
    told = topology.exchange((refused[:_MOST_TOLD], digest(loaded)), label="what does not fit")
    misfits = [f"rank {rank}: {each}" for rank, (found, _) in enumerate(told) for each in found]
    if not misfits and len({each for _, each in told}) > 1:
        misfits = _named_differences(topology.exchange(loaded, label="what is loaded"))[:_MOST_TOLD]
    return misfits


def _named_differences(everyone: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the names that some ranks lack, or that have different checksums, each with these ranks, in words."""
    found = []
    for name in dict.fromkeys(name for known in everyone for name in known):
        without = [rank for rank, known in enumerate(everyone) if name not in known]
        ranks = {
            r: known[name] for r, known in enumerate(everyone) if known.get(name, UNCOMPARED) != UNCOMPARED
        }
        others = [rank for rank, each in ranks.items() if each != next(iter(ranks.values()))]
        if without:
            found.append(
                f"parameter {name!r}: expected it on all ranks, and there is none on {_told(without)}; {_ADVICE}"
            )
        elif others:
            found.append(
                f"parameter {name!r}: expected the same values on all ranks, found different ones on {_told(others)} "
                f"than on rank {next(iter(ranks))}; {_ADVICE}"
            )
    return found


def _told(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
