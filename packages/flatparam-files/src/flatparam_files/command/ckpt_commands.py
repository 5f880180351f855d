"""`flatparam ckpt`: what a checkpoint holds, where two differ, and the same checkpoint in a different format."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from flatparam_core import Span
from flatparam_files import (
    CheckpointError,
    Source,
    TensorInfo,
    UnknownFormatError,
    UnreadableError,
    averages_as_model,
    cast_model,
    open_source,
    select,
    split_path,
    verify_source,
    watch,
    write_checkpoint,
    write_dcp,
    write_hugging_face,
    write_torch_file,
)
from flatparam_files.command.shared import ArgumentsError, say, say_aside, shown_nbytes
from flatparam_files.disk.progress import progress_bar
from flatparam_files.disk.system import free_nbytes

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
    with progress_bar("verify", total, False if chosen.quiet else chosen.bar) as observe:
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
    source = open_source(*(pair or [chosen.source]), format=chosen.format, prefix=chosen.prefix)
    for part, path in (("model", chosen.model), ("optimizer", chosen.optimizer)):
        if path is not None and not select(source, [part]).tensors and part not in source.values:
            raise ArgumentsError(f"{path}, which was given as --{part}, has none")
    return parts_of(source, chosen.only)


def parts_of(source: Source, only: list[str] | None) -> Source:
    """Return the parts of a source that were asked for; a CheckpointError if it has none of them."""
    if not only:
        return source
    chosen = select(source, only)
    if not chosen.tensors and not chosen.values:
        raise CheckpointError(f"the checkpoint has no {' and no '.join(only)}")
    return chosen


_AT_ONCE_NBYTES: Final = 1 << 21
"""Bytes of a tensor that are compared at once."""
_WIDE_NUMEL: Final = 1 << 18
"""Elements that are compared in float64 at once."""
_SHOWN: Final = 20
"""Differences that are shown without `--all`."""


def diff(chosen: argparse.Namespace) -> int:
    """Compare the checkpoints; returns the exit status."""
    first, second = (
        parts_of(open_source(path, format=chosen.format, prefix=chosen.prefix), chosen.only)
        for path in (chosen.first, chosen.second)
    )
    differences = [*_structure(first, second, chosen), *_values("", first.values, second.values)]
    differences += _elements(first, second, chosen)
    if not differences:
        if not chosen.quiet:
            say(f"equal: {len(first.tensors)} tensors")
        return 0
    if not chosen.quiet:
        shown = differences if chosen.all else differences[:_SHOWN]
        for line in shown:
            say(line)
        if len(shown) < len(differences):
            say(f"... and {len(differences) - len(shown)} more (--all shows them)")
    return 1


def _structure(first: Source, second: Source, chosen: argparse.Namespace) -> Iterator[str]:
    for name, here, there in ((chosen.first, first, second), (chosen.second, second, first)):
        for path in here.tensors:
            if path not in there.tensors:
                yield f"{path}: only in {name}"
    for path, info in first.tensors.items():
        other = second.tensors.get(path, info)
        if info.shape != other.shape:
            yield f"{path}: shapes {list(info.shape)} and {list(other.shape)}"
        if info.dtype != other.dtype and not chosen.ignore_dtype:
            yield f"{path}: dtypes {info.dtype} and {other.dtype}"


def _values(path: str, first: Any, second: Any) -> Iterator[str]:
    """Yield a line for each difference of two trees of values; a tuple and a list of the same items are equal."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in {**first, **second}:
            where = f"{path}/{key}" if path else str(key)
            if key not in first or key not in second:
                if not _is_bare(first.get(key, second.get(key))):
                    yield f"{where}: only in {'the first' if key in first else 'the second'}"
            else:
                yield from _values(where, first[key], second[key])
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        # The names of a group: state is by name, so their order says nothing.
        if path.endswith("/params") and sorted(first, key=str) == sorted(second, key=str):
            return
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _values(f"{path}/{index}", one, other)
    elif not (type(first) is type(second) and (first == second or first != first)):
        yield f"{path}: {first!r} and {second!r}"


def _is_bare(value: Any) -> bool:
    """Return whether a tree has no value in it: what is left if all that it had were tensors."""
    return value is None or (isinstance(value, Mapping) and all(map(_is_bare, value.values())))


def _elements(first: Source, second: Source, chosen: argparse.Namespace) -> list[str]:
    common = [
        path
        for path, info in first.tensors.items()
        if path in second.tensors and info.shape == second.tensors[path].shape and info.numel
    ]
    found = []
    nbytes = sum(first.tensors[path].nbytes for path in common)
    with progress_bar("diff", nbytes, False if chosen.quiet else chosen.bar) as observe:
        for path in common:
            info, other_info = first.tensors[path], second.tensors[path]
            difference = _Difference(info, chosen.tolerance)
            step = _AT_ONCE_NBYTES // max(info.dtype.itemsize, other_info.dtype.itemsize)
            for start in range(0, info.numel, step):
                span = Span(start, min(start + step, info.numel))
                one, other = (torch.cat(list(source.read(path, span))) for source in (first, second))
                difference.add(start, one, other)
                observe(one.nbytes)
            if difference.count:
                found.append(f"{path}: {difference}")
    return found


@final
@attrs.define(eq=False)
class _Difference:
    """How two tensors of one shape differ, found chunk by chunk."""

    info: TensorInfo
    tolerance: float
    count: int = 0
    largest: float = -1.0
    at: int = 0

    def add(self, start: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Compare the elements from `start` on."""
        if first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
            return
        for begin in range(0, first.numel(), _WIDE_NUMEL):
            parts = [each[begin : begin + _WIDE_NUMEL] for each in (first, second)]
            one, other = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in parts)
            same = (one == other) | (one.isnan() & other.isnan())
            if first.dtype == second.dtype and not (first.is_floating_point() or first.is_complex()):
                # float64 does not tell large integers apart.
                bits, others = (each.view(torch.uint8).view(len(each), -1) for each in parts)
                same = (bits == others).all(dim=1)
            apart = (one - other).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
            differing = ~same & (apart > self.tolerance) if self.tolerance else ~same
            self.count += int(differing.sum())
            apart = torch.where(differing, apart, -1.0)
            where = int(apart.argmax())
            if float(apart[where]) > self.largest:
                self.largest, self.at = float(apart[where]), start + begin + where

    def __str__(self) -> str:
        index, left = [], self.at
        for size in reversed(self.info.shape):
            left, here = divmod(left, size)
            index.append(here)
        return f"{self.count} of {self.info.numel} elements differ, by at most {self.largest:.6g} (at {index[::-1]})"


_EXPORTS: Final[Mapping[str, Callable[..., dict[str, int]]]] = dict(
    hf=write_hugging_face, torch=write_torch_file, dcp=write_dcp
)


def write_own(chosen: argparse.Namespace) -> int:
    """Write a checkpoint of our own; returns the exit status."""
    source = _to_convert(chosen)
    step = source.facts.get("step", 0) if chosen.step is None else chosen.step
    write = partial(write_checkpoint, world_size=chosen.world_size, step=step)
    status = _converted(source, chosen, write)
    if chosen.step is None and "step" not in source.facts and not chosen.quiet:
        say_aside(f"{chosen.source or chosen.model or chosen.optimizer} says no step, so it is 0; --step gives another")
    return status


def export(chosen: argparse.Namespace) -> int:
    """Write a checkpoint for another program; returns the exit status."""
    options = {}
    for to, option, given in (
        ("hf", "max_shard_nbytes", chosen.max_shard_size),
        ("dcp", "world_size", chosen.world_size),
    ):
        if given is not None and chosen.to != to:
            name = "--max-shard-size" if to == "hf" else "--world-size"
            raise ArgumentsError(f"{name} goes with --to {to}, and not with --to {chosen.to}")
        if given is not None:
            options[option] = given
    return _converted(_to_convert(chosen), chosen, partial(_EXPORTS[chosen.to], **options))


def _to_convert(chosen: argparse.Namespace) -> Source:
    averages = getattr(chosen, "averages", None)
    if averages is not None and chosen.only:
        raise ArgumentsError("--averages writes the averages and nothing else: leave --only out")
    if getattr(chosen, "to", None) == "hf" and averages is None:
        chosen.only = chosen.only or ["model"]
    source = opened(chosen) if averages is None else averages_as_model(opened(chosen), averages)
    _refuse_inside(source, chosen)
    differing = source.facts.get("per_rank")
    if differing and "optimizer" in source.values:
        raise CheckpointError(
            f"{len(differing)} states of the optimizer differ between the ranks without being cut like their "
            f"parameter, such as {differing[0]!r}; no other format or number of ranks can hold them",
            hint="leave the optimizer out with --only model",
        )
    return source if chosen.dtype is None else cast_model(source, getattr(torch, chosen.dtype))


def _refuse_inside(source: Source, chosen: argparse.Namespace) -> None:
    """Refuse to write into the checkpoint that is read; a run of ours may get a different step."""
    destination = chosen.destination.resolve()
    for path in filter(None, (chosen.source, chosen.model, chosen.optimizer)):
        inside = Path(path).resolve()
        is_run = source.format == "flatparam" and not (inside / "manifest.json").exists()
        if not is_run and (destination == inside or inside in destination.parents):
            raise CheckpointError(
                f"{chosen.destination} is in the checkpoint that is read, {path}",
                path=chosen.destination,
                hint="choose a different place",
            )


def _converted(source: Source, chosen: argparse.Namespace, write: Callable[..., dict[str, int]]) -> int:
    """Say with `dry_run` what `write(source, destination)` writes, and let it."""
    planned = write(source, chosen.destination, dry_run=True)
    nbytes, free = sum(planned.values()), free_nbytes(chosen.destination.absolute())
    if nbytes > free:
        # What cannot be finished is not begun.
        raise CheckpointError(
            f"{chosen.destination} needs {shown_nbytes(nbytes)}, and {shown_nbytes(free)} are free",
            path=chosen.destination,
            hint="choose a different place",
        )
    if not chosen.dry_run:
        with progress_bar(chosen.destination.name, nbytes, False if chosen.quiet else chosen.bar) as observe:
            write(watch(source, observe), chosen.destination)
    if not chosen.quiet:
        verb = "would write" if chosen.dry_run else "wrote"
        for name, nbytes_of_file in planned.items():
            place = chosen.destination if chosen.destination.name == name else chosen.destination / name
            say(f"{verb} {place}: {shown_nbytes(nbytes_of_file)}")
        count = "1 file" if len(planned) == 1 else f"{len(planned)} files"
        say(f"{count}, {shown_nbytes(nbytes)} of tensors")
    return 0
