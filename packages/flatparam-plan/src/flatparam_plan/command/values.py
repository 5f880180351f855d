"""From the text of an argument of `flatparam plan` to its value."""

from __future__ import annotations

import argparse
import ast
from typing import Any

__all__ = ["named_value", "norm", "positive", "worlds"]


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return number


def norm(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return number


def named_value(text: str) -> tuple[str, Any]:
    """A name and a value such as `layers=4`; what is no Python literal is a text."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def worlds(text: str) -> list[int]:
    """World sizes: `8`, `8,16,24`, or `8..4096` for its powers of two."""
    first, separator, last = text.partition("..")
    if not separator:
        return [positive(each) for each in text.split(",")]
    sizes = [positive(first)]
    if positive(last) < sizes[0]:
        raise argparse.ArgumentTypeError(
            f"expected the smaller number of ranks first, as in 8..64, found {text!r}"
        )
    while sizes[-1] * 2 <= positive(last):
        sizes.append(sizes[-1] * 2)
    return sizes
