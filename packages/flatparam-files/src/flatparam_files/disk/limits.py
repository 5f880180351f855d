"""The cost of reading a file is limited: memory in proportion to its own size, whatever it says."""

from __future__ import annotations

from typing import Final

__all__ = [
    "MAX_DIMS",
    "MAX_INTEGER_BITS",
    "MAX_MANIFEST_NBYTES",
    "MAX_PUBLISHED_NBYTES",
    "allowed_nbytes",
    "is_short_integer",
]

_SMALL_NBYTES: Final = 2**26
MAX_DIMS: Final = 1024
"""The most dimensions of a tensor: products of their sizes stay small numbers."""
MAX_INTEGER_BITS: Final = 14_000
"""Of an integer: Python refuses to print one of more than 4,300 decimal digits, which are some more bits."""
MAX_MANIFEST_NBYTES: Final = 2**30
"""Of the manifest of a checkpoint, whose blocks each have a hash there."""
MAX_PUBLISHED_NBYTES: Final = 2**26
"""Of the manifest of a mailbox, and of its list of tensors, which receivers read again and again."""


def allowed_nbytes(nbytes: int, times: int) -> int:
    """The bytes that the objects in a file of `nbytes` may take: `times` as many, or 64 MiB if that is more."""
    return max(_SMALL_NBYTES, times * nbytes)


def is_short_integer(value: int) -> bool:
    """Whether `value` can be printed, and is cheap to compute with."""
    return value.bit_length() <= MAX_INTEGER_BITS
