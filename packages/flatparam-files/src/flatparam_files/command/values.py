"""From the text of an argument to its value."""

from __future__ import annotations

import argparse
import re
from typing import Final

__all__ = [
    "DTYPES",
    "dtype_name",
    "natural",
    "nbytes_of",
    "ranks",
    "tolerance",
]

_MOST_RANKS: Final = 2**20
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(I?)B?", re.IGNORECASE)


def nbytes_of(text: str) -> int:
    """The bytes of a size such as `5GB`, `512 MiB` or `1000`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 512MiB, found {text!r}")
    number, unit, binary = found.groups()
    factor = _UNITS[unit.upper()]
    if binary:
        factor = 1024 ** list(_UNITS).index(unit.upper())
    nbytes = int(float(number) * factor)
    if nbytes < 1:
        raise argparse.ArgumentTypeError("expected a size of at least one byte")
    return nbytes


def ranks(text: str) -> int:
    """A number of ranks, each of which gets a file of its own."""
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {_MOST_RANKS}, found {text!r}")
    return number


def natural(text: str) -> int:
    """A number of at least 0, of 63 bits at most."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(
            f"expected a number of at least 0 and at most 2**63 - 1, found {text!r}"
        )
    return int(text)


DTYPES: Final = {
    **{name: name for name in ("float64", "float32", "float16", "bfloat16")},
    **{"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"},
}
"""The dtypes that can be asked for, and what torch calls them."""


def dtype_name(text: str) -> str:
    """Torch's name of a dtype such as `bfloat16` or `bf16`."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}, found {text!r}")
    return DTYPES[text]


def tolerance(text: str) -> float:
    """A number of at least 0, with a fraction or not."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text!r}")
    return number
