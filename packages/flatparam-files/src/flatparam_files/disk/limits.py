"""The cost of reading a file is limited: memory in proportion to its own size, whatever it says, and its JSON too."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

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
    """Return the bytes that the objects in a file of `nbytes` may take: `times` as many, or 64 MiB if that is more."""
    return max(_SMALL_NBYTES, times * nbytes)


def is_short_integer(value: int) -> bool:
    """Return whether `value` can be printed, and is cheap to compute with."""
    return value.bit_length() <= MAX_INTEGER_BITS


# JSON of unknown origin: parsed without surprises


_TIMES: Final = 16
"""The most bytes of Python objects for each byte of a large text. Manifests and headers take up to twelve."""
_CHUNK_NBYTES: Final = 2**20
_MAX_DIGITS: Final = 30
"""Of an integer; nothing that is read here has more than 64 bits."""
_LONG: Final = b"0" * (_MAX_DIGITS + 1)
_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)


def parse_json(data: bytes) -> Any:
    """Return the value that `data` (UTF-8) is the JSON of: no key twice, no NaN, no depth that ends the process.

    Memory: what `check_cost` allows, and some copies of the text.

    Raises:
        ValueError: for anything else, saying why.
    """
    check_cost(data)
    # To look at each integer takes as long as everything else; the digits may be those of a string.
    parse_int = _short_integer if _LONG in data.translate(_DIGITS) else None
    try:
        with without_collector():
            return json.loads(
                data.decode("utf-8"),
                object_pairs_hook=_without_twins,
                parse_constant=_refuse_constant,
                parse_int=parse_int,
            )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_cost(data: bytes) -> None:
    """Refuse a JSON text whose values take far more memory than the text, before any of them is made.

    Python takes 27 bytes for each byte of `[],[],[]`.

    Raises:
        ValueError: if the values take more than 64 MiB, and more than 16 times the text, saying how much.
    """
    allowed = allowed_nbytes(len(data), _TIMES)
    # No text takes more than 100 times its size: the estimate of the densest, `{},{},{}`, is 84 times.
    if 100 * len(data) <= allowed:
        return
    cost = sum(map(_cost, _outside_of_strings(data)))
    if cost > allowed:
        raise ValueError(
            f"its {len(data):,} bytes are of so many small values that they would take about {cost:,} bytes of "
            f"memory; expected at most {allowed:,}"
        )


def _outside_of_strings(data: bytes) -> Iterator[bytes]:
    """Yield the text in pieces, with `"` in the place of each string."""
    inside, cut = False, b""
    for at in range(0, len(data), _CHUNK_NBYTES):
        chunk = cut + data[at : at + _CHUNK_NBYTES]
        # A backslash at the end belongs to what follows, unless it is itself escaped.
        cut = b"\\" * ((len(chunk) - len(chunk.rstrip(b"\\"))) % 2)
        chunk = chunk[: len(chunk) - len(cut)]
        parts = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b'"'.join(parts[inside::2])
        inside ^= len(parts) % 2 == 0


def _cost(structure: bytes) -> int:
    """About how many bytes the values take; a key that occurs again and again takes none."""
    count = structure.count
    empty_objects, empty_lists = count(b"{}"), count(b"[]")
    objects, lists = count(b"{") - empty_objects, count(b"[") - empty_lists
    keys, strings, items = count(b":"), count(b'"'), count(b",")
    letters = len(structure) - sum(map(count, (b"{", b"}", b"[", b"]", b":", b'"', b",")))
    return (
        80 * (empty_objects + empty_lists)
        + 248 * objects
        + 112 * lists
        # A small object has room for five keys.
        + 300 * max(0, keys - 5 * objects)
        + 16 * keys
        + 73 * max(0, strings - keys)
        + 9 * items
        # Numbers: `1.5,` takes 32 bytes beside the comma.
        + 10 * letters
    )


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("expected each key once, found one twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected a number of JSON, found {name}")


def _short_integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits):,} digits; expected at most {_MAX_DIGITS}")
    return int(digits)


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside, Python looks for no cycles: among millions of new values that are none, that takes half of the time.

    So nothing is freed at a time that depends on what ran before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
