"""The checkpoints of earlier runs in a folder. Torch is imported only where there is one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from attrs import frozen

from .errors import UserError
from .options import Recipe

_NAMES: Final = f"step-{'[0-9]' * 8}"
_ADVICE: Final = "Remove it to go on from the one before, or give --fresh to start over."


@frozen
class Checkpoint:
    """A committed checkpoint, its step, and the number of ranks that wrote it."""

    path: Path
    step: int
    ranks: int

    def check_files(self) -> None:
        """Raise `UserError` unless every byte is as it was written."""
        from flatparam_state import CheckpointError, verify_checkpoint

        try:
            problems = verify_checkpoint(self.path).problems
        except CheckpointError as error:
            problems = (str(error),)
        if problems:
            raise UserError(f"{self.path} is damaged ({problems[0]}). {_ADVICE}")


def newest(folder: Path, recipe: Recipe) -> Checkpoint | None:
    """The checkpoint of most steps, or None where there is none; `UserError` unless it is one of this recipe."""
    path = max(folder.glob(_NAMES), default=None)
    if path is None:
        return None
    from flatparam_state import CheckpointError, open_checkpoint

    try:
        with open_checkpoint(path) as reader:
            step, ranks = reader.manifest.step, reader.manifest.world_size
            there = dict(reader.values["extra"]["recipe"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a readable checkpoint of this job ({error}). {_ADVICE}") from error
    differences = [
        f"{name} {there.get(name)} there, {here} here"
        for name, here in recipe.to_json().items()
        if there.get(name) != here
    ]
    if differences:
        raise UserError(
            f"{path} is of another run ({'; '.join(differences)}). Give --fresh to start over, or --out another folder."
        )
    return Checkpoint(path, step, ranks)


def remove_all(folder: Path) -> None:
    """Remove every checkpoint, and nothing else."""
    for path in folder.glob(_NAMES):
        shutil.rmtree(path)
