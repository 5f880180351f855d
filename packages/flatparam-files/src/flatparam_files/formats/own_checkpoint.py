"""Writing a source as a checkpoint directory of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flatparam_core import Span
from flatparam_files.checkpoint.directory import CheckpointDirectory
from flatparam_files.checkpoint.manifest import rank_file
from flatparam_files.checkpoint.writer import CheckpointWriter, share_of
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.source import Source
from flatparam_files.disk.system import AnyPath
from flatparam_files.formats.output import refuse_existing
from flatparam_files.formats.whole_sources import stored_source


def write_checkpoint(
    source: Source, directory: AnyPath, *, world_size: int = 1, step: int = 0, dry_run: bool = False
) -> dict[str, int]:
    """Write a source as the checkpoint of `step` in the directory of a run, as `world_size` ranks would have.

    Args:
        directory: of the run; made if it is not there. Other checkpoints in it stay.
        dry_run: write nothing.

    Returns:
        The bytes of tensors by file, relative to `directory`.

    Raises:
        CheckpointError: if there is a checkpoint of `step` or of a later one already, or something cannot be written.
    """
    run = CheckpointDirectory(Path(directory))
    place = run.path_of(step)
    refuse_existing(place)
    _refuse_older(run, step)
    aliases = stored_source(source).aliases()
    tensors = {path: info for path, info in source.tensors.items() if path not in aliases}
    if not dry_run:
        with (
            _gone_if_it_fails(Path(directory)),
            CheckpointWriter(
                directory, tensors, source.values, world_size=world_size, step=step, aliases=aliases
            ) as writer,
        ):
            for path, info in tensors.items():
                writer.write(path, source.read(path, Span(0, info.numel)))
            writer.commit()
    return {
        f"{place.name}/{rank_file(rank)}": sum(
            share_of(info.numel, rank, world_size).numel * info.dtype.itemsize for info in tensors.values()
        )
        for rank in range(world_size)
    }


def _refuse_older(run: CheckpointDirectory, step: int) -> None:
    """Refuse a step before the newest one: it would be the latest, and retention deletes what is not."""
    newest = max(run.steps(), default=-1)
    if step < newest:
        raise CheckpointError(
            f"{run.root} is the directory of a run with a checkpoint of step {newest}, and the new one of step {step} "
            "would be its latest",
            path=run.root,
            hint="choose a different directory, or a later step",
        )


@contextmanager
def _gone_if_it_fails(directory: Path) -> Iterator[None]:
    """If the directory was not there before, and the block fails, it is not there afterwards."""
    existed = directory.exists()
    try:
        yield
    except BaseException:
        if not existed and not CheckpointDirectory(directory).steps():
            with suppress(OSError):
                (directory / "lock").unlink(missing_ok=True)
                # This refuses if somebody else has put something there.
                directory.rmdir()
        raise
