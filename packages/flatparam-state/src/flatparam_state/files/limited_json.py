"""JSON of unknown origin: parsed without surprises."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parse_json"]


def parse_json(data: bytes) -> Any:
    """The value that `data` (UTF-8) is the JSON of: no key twice, no NaN, no depth that ends the process.

    Raises:
        ValueError: for anything else, saying why.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_without_twins, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
