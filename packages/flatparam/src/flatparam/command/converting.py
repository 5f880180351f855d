"""`flatparam ckpt reshard`, `export` and `import`: from one checkpoint to another."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from flatparam.command.options import (
    add_reading,
    command,
    dtype_of,
    natural,
    nbytes_of,
    opened,
    positive,
    say,
    shown_nbytes,
)
from flatparam.command.progress import add_progress, showing
from flatparam_state import (
    CheckpointError,
    Source,
    cast_model,
    watch,
    write_checkpoint,
    write_dcp,
    write_hugging_face,
    write_torch_file,
)

__all__ = ["add_to"]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    text = "write a checkpoint anew as another number of ranks would have; it need not be done before loading"
    _add_own(commands, "reshard", text, needs_world_size=True)
    text = "make a checkpoint directory of flatparam from a checkpoint of another format"
    _add_own(commands, "import", text, needs_world_size=False)
    text = "write a checkpoint in the format of another program"
    added = command(commands, "export", text, _export)
    _add_paths(added, "a new file or directory")
    added.add_argument(
        "--to", choices=tuple(_EXPORTS), required=True, help="Hugging Face safetensors, torch.save, DCP"
    )
    added.add_argument(
        "--max-shard-size",
        type=nbytes_of,
        default=5 * 10**9,
        metavar="SIZE",
        help="hf: the most bytes of tensors in a file, such as 2GB (default: 5GB)",
    )
    added.add_argument("--world-size", type=positive, default=1, help="dcp: the number of files (default: 1)")
    _add_writing(added)


def _add_own(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    *,
    needs_world_size: bool,
) -> None:
    added = command(commands, name, text, _write_own)
    _add_paths(added, "the directory of a run; made where it is not there")
    added.add_argument(
        "--world-size",
        type=positive,
        required=needs_world_size,
        default=1,
        help="the number of ranks" + ("" if needs_world_size else " (default: 1)"),
    )
    added.add_argument("--step", type=natural, help="the step of the new one (default: the same, or 0)")
    _add_writing(added)


def _add_paths(added: argparse.ArgumentParser, destination: str) -> None:
    added.add_argument(
        "source", metavar="SRC", nargs="?", help="the checkpoint to read; or give --model, --optimizer"
    )
    added.add_argument("destination", metavar="DEST", type=Path, help=destination)


def _add_writing(added: argparse.ArgumentParser) -> None:
    added.add_argument(
        "--dtype", type=dtype_of, help="cast the model's floating-point tensors, such as to bfloat16"
    )
    added.add_argument("--dry-run", action="store_true", help="only say what would be written")
    add_reading(added)
    add_progress(added)


_EXPORTS: Final[dict[str, Callable[..., dict[str, int]]]] = {
    "hf": write_hugging_face,
    "torch": write_torch_file,
    "dcp": write_dcp,
}


def _write_own(chosen: argparse.Namespace) -> int:
    source = _to_convert(chosen)
    step = source.facts.get("step", 0) if chosen.step is None else chosen.step
    write = partial(write_checkpoint, world_size=chosen.world_size, step=step)
    return _converted(source, chosen, write)


def _export(chosen: argparse.Namespace) -> int:
    options = {
        "hf": {"max_shard_nbytes": chosen.max_shard_size},
        "torch": {},
        "dcp": {"world_size": chosen.world_size},
    }
    write = partial(_EXPORTS[chosen.to], **options[chosen.to])
    return _converted(_to_convert(chosen), chosen, write)


def _to_convert(chosen: argparse.Namespace) -> Source:
    if getattr(chosen, "to", None) == "hf":
        chosen.only = chosen.only or ["model"]
    source = opened(chosen)
    _refuse_inside(source, chosen)
    differing = source.facts.get("per_rank")
    if differing and "optimizer" in source.values:
        raise CheckpointError(
            f"{len(differing)} states of the optimizer differ between the ranks without being cut like their "
            f"parameter, such as {differing[0]!r}; no other format or number of ranks can hold them",
            hint="leave the optimizer out with --only model",
        )
    return source if chosen.dtype is None else cast_model(source, chosen.dtype)


def _refuse_inside(source: Source, chosen: argparse.Namespace) -> None:
    """Refuse to write into the checkpoint that is read; a run of ours may get another step."""
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
                hint="choose another place",
            )


def _converted(source: Source, chosen: argparse.Namespace, write: Callable[..., dict[str, int]]) -> int:
    """Say with `dry_run` what `write(source, destination)` writes, and let it."""
    planned = write(source, chosen.destination, dry_run=True)
    _check_space(chosen.destination, sum(planned.values()))
    if not chosen.dry_run:
        with showing(chosen, chosen.destination.name, sum(planned.values())) as observe:
            write(watch(source, observe), chosen.destination)
    if not chosen.quiet:
        verb = "would write" if chosen.dry_run else "wrote"
        for name, nbytes in planned.items():
            say(f"{verb} {_shown(chosen.destination, name)}: {shown_nbytes(nbytes)}")
        count = "1 file" if len(planned) == 1 else f"{len(planned)} files"
        say(f"{count}, {shown_nbytes(sum(planned.values()))} of tensors")
    return 0


def _shown(destination: Path, name: str) -> Path:
    return destination if destination.name == name else destination / name


def _check_space(destination: Path, nbytes: int) -> None:
    """Refuse to begin what cannot be finished."""
    place = destination.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if nbytes > free:
        raise CheckpointError(
            f"{destination} needs {shown_nbytes(nbytes)}, and {shown_nbytes(free)} are free",
            path=destination,
            hint="choose another place",
        )
