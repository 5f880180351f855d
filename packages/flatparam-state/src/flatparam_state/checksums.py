"""Checksums of full tensors that every rank is given: each keeps only its own part, so they have to be the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import xxhash
from torch import Tensor

from flatparam_runtime import Threshold
from flatparam_state.files.tensor_bytes import buffer_of
from flatparam_state.forms import is_ordinary

__all__ = ["checksums", "digest", "named_differences"]

CHECKED_NUMEL: Final = Threshold(
    "state.checked_numel",
    2**16,
    "Ranks that load full tensors compare so many elements of each, evenly spread if it has more.",
)


def checksums(values: Mapping[str, Any]) -> dict[str, int]:
    """A checksum of each tensor in `values`, by name; what is no ordinary tensor of a full shape is left out."""
    return {
        name: _checksum(value) for name, value in values.items() if is_ordinary(value) and not value.is_meta
    }


def digest(found: Mapping[str, int]) -> int:
    """One number for all of these checksums, the same in every process."""
    number: int = xxhash.xxh3_64_intdigest(repr(sorted(found.items())).encode())
    return number


def _checksum(value: Tensor) -> int:
    step = math.ceil(value.numel() / CHECKED_NUMEL.value) or 1
    found: int = xxhash.xxh3_64_intdigest(buffer_of(value.detach().reshape(-1)[::step].cpu()))
    return found


def named_differences(everyone: Sequence[Mapping[str, int]]) -> list[str]:
    """The names that have different checksums on ranks that have both, each with these ranks, in words."""
    found = []
    for name in dict.fromkeys(name for known in everyone for name in known):
        ranks = {rank: known[name] for rank, known in enumerate(everyone) if name in known}
        first = next(iter(ranks.values()))
        others = [rank for rank, each in ranks.items() if each != first]
        if others:
            differing = f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}"
            found.append(
                f"parameter {name!r}: expected the same values on all ranks, found different ones on {differing} than "
                f"on rank {next(iter(ranks))}; load the same state on every rank"
            )
    return found
