"""`flatparam ckpt reshard`, `export` and `import`: from one checkpoint to another."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch

from flatparam_files import (
    CheckpointError,
    Source,
    averages_as_model,
    cast_model,
    watch,
    write_checkpoint,
    write_dcp,
    write_hugging_face,
    write_torch_file,
)
from flatparam_files.command.inspecting import opened
from flatparam_files.command.shared import ArgumentsError, say, showing, shown_nbytes
from flatparam_files.disk import free_nbytes

_EXPORTS: Final[dict[str, Callable[..., dict[str, int]]]] = {
    "hf": write_hugging_face,
    "torch": write_torch_file,
    "dcp": write_dcp,
}


def write_own(chosen: argparse.Namespace) -> int:
    """Write a checkpoint of our own; returns the exit status."""
    source = _to_convert(chosen)
    step = source.facts.get("step", 0) if chosen.step is None else chosen.step
    write = partial(write_checkpoint, world_size=chosen.world_size, step=step)
    return _converted(source, chosen, write)


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
    write = partial(_EXPORTS[chosen.to], **options)
    return _converted(_to_convert(chosen), chosen, write)


def _to_convert(chosen: argparse.Namespace) -> Source:
    averages = getattr(chosen, "averages", None)
    if averages is not None and chosen.only:
        raise ArgumentsError("--averages writes the averages and nothing else: leave --only out")
    if getattr(chosen, "to", None) == "hf":
        chosen.only = chosen.only or ["model"]
    if averages is None:
        source = opened(chosen)
    else:
        chosen.only = None
        source = averages_as_model(opened(chosen), averages)
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
    for path in (chosen.source, chosen.model, chosen.optimizer):
        if path is None:
            continue
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
        with showing(chosen, chosen.destination.name, nbytes) as observe:
            write(watch(source, observe), chosen.destination)
    if not chosen.quiet:
        verb = "would write" if chosen.dry_run else "wrote"
        for name, nbytes_of_file in planned.items():
            place = chosen.destination if chosen.destination.name == name else chosen.destination / name
            say(f"{verb} {place}: {shown_nbytes(nbytes_of_file)}")
        count = "1 file" if len(planned) == 1 else f"{len(planned)} files"
        say(f"{count}, {shown_nbytes(nbytes)} of tensors")
    return 0
