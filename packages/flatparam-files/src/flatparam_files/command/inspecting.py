"""`flatparam ckpt inspect` and `verify`: what is in a checkpoint, and is it still what was written?"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, final

import attrs

from flatparam_files import (
    CheckpointError,
    Source,
    TensorInfo,
    UnknownFormatError,
    UnreadableError,
    open_source,
    select,
    split_path,
    verify_source,
)
from flatparam_files.command.shared import ArgumentsError, say, say_aside, showing, shown_nbytes

__all__ = ["inspect", "opened", "parts_of", "verify"]

_VALUE_WIDTH = 60


def inspect(chosen: argparse.Namespace) -> int:
    """Show the checkpoint; returns the exit status."""
    source = opened(chosen)
    if chosen.json:
        json.dump(_as_json(source), sys.stdout, indent=2, default=str)
        sys.stdout.write("\n")
        return 0
    nbytes = sum(info.nbytes for info in source.tensors.values())
    say(f"{source.format}, {len(source.tensors)} tensors, {shown_nbytes(nbytes)}")
    for name, fact in source.facts.items():
        if fact not in (None, "", (), [], {}):
            say(f"{name}: {_short(fact)}")
    for line in _lines(_tree_of(source), 0, chosen.depth):
        say(line)
    return 0


def _as_json(source: Source) -> dict[str, Any]:
    return {
        "format": source.format,
        "facts": dict(source.facts),
        "nbytes": sum(info.nbytes for info in source.tensors.values()),
        "tensors": {
            path: {"shape": list(info.shape), "dtype": _dtype(info), "nbytes": info.nbytes}
            for path, info in source.tensors.items()
        },
        "values": _for_json(source.values),
    }


def _for_json(values: Any) -> Any:
    """Values as JSON has them: without numbers as keys, infinity and NaN."""
    if isinstance(values, Mapping):
        return {str(key): _for_json(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_for_json(value) for value in values]
    return str(values) if isinstance(values, float) and not math.isfinite(values) else values


@final
@attrs.define(eq=False)
class _Node:
    """A place in the tree: what is there itself, and what is below it."""

    leaf: str = ""
    below: dict[str, _Node] = attrs.field(factory=dict)
    tensors: int = 0
    nbytes: int = 0


def _tree_of(source: Source) -> _Node:
    root = _Node()
    for path, info in source.tensors.items():
        node = root
        # The parts of its path are the levels at which it is shown, and a parameter's name is cut at its dots.
        for name in (name for part in split_path(path) for name in part.split(".") if name):
            node = node.below.setdefault(name, _Node())
            node.tensors += 1
            node.nbytes += info.nbytes
        node.leaf = f"{list(info.shape)} {_dtype(info)}, {shown_nbytes(info.nbytes)}"
    _add_values(root, source.values)
    return root


def _add_values(node: _Node, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        inner = node
        for name in str(key).split("."):
            inner = inner.below.setdefault(name, _Node())
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            value = {str(index): each for index, each in enumerate(value)}
        if isinstance(value, Mapping):
            _add_values(inner, value)
        else:
            inner.leaf = inner.leaf or _short(value)


def _lines(node: _Node, level: int, depth: int | None) -> Iterator[str]:
    if depth is not None and level >= depth:
        return
    for name, each in node.below.items():
        # A chain gets one line.
        while len(each.below) == 1 and not each.leaf:
            ((inner, each),) = each.below.items()
            name = f"{name}.{inner}"
        summary = each.leaf
        if each.below and each.tensors:
            plural = "tensor" if each.tensors == 1 else "tensors"
            summary = f"{each.tensors} {plural}, {shown_nbytes(each.nbytes)}"
        yield f"{'  ' * level}{name}{': ' if summary else ''}{summary}"
        yield from _lines(each, level + 1, depth)


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 3]}..."


# `verify`


def verify(chosen: argparse.Namespace) -> int:
    """Verify the checkpoint; returns the exit status."""
    try:
        with warnings.catch_warnings():
            # What is opened instead of a damaged checkpoint is one of the problems below.
            warnings.simplefilter("ignore")
            source = opened(chosen)
    except (ArgumentsError, UnknownFormatError, UnreadableError):
        raise
    except CheckpointError as error:
        say_aside(error)
        return 1
    total = sum(info.nbytes for info in source.tensors.values())
    with showing(chosen, "verify", total) as observe:
        found = verify_source(source, observe)
    for problem in found.problems:
        say_aside(problem)
    if found.problems:
        return 1 if found.is_damaged else 2
    if not chosen.quiet:
        unproven = found.unproven_nbytes
        proven = f"{shown_nbytes(found.nbytes - unproven)} are what was written"
        whole = f"{shown_nbytes(unproven)} are there, and have no checksums in this format"
        said = " and ".join(text for text, n in ((proven, found.nbytes - unproven), (whole, unproven)) if n)
        say(f"{source.format}, {len(source.tensors)} tensors: {said or 'nothing to read'}")
    return 0


# The checkpoint that the arguments name


def opened(chosen: argparse.Namespace) -> Source:
    """Return the checkpoint that the arguments name.

    Raises:
        ArgumentsError: if they name none, or both a path and a pair of files.
        CheckpointError: if it cannot be opened.
    """
    pair = [path for path in (chosen.model, chosen.optimizer) if path is not None]
    if bool(pair) == (chosen.source is not None):
        raise ArgumentsError("give either the path of a checkpoint, or --model and --optimizer")
    return parts_of(
        open_source(*(pair or [chosen.source]), format=chosen.format, prefix=chosen.prefix), chosen.only
    )


def parts_of(source: Source, only: list[str] | None) -> Source:
    """Return the parts of a source that were asked for; a CheckpointError if it has none of them."""
    if not only:
        return source
    chosen = select(source, only)
    if not chosen.tensors and not chosen.values:
        raise CheckpointError(f"the checkpoint has no {' and no '.join(only)}")
    return chosen
